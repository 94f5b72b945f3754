"""Llama 3, and Llama 3.1 and later, with the date and tools in the prompt.

::

    <|begin_of_text|><|start_header_id|>system<|end_header_id|>\\n\\n…<|eot_id|><|start_header_id|>user<|end_header_id|>…
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from typing_extensions import override

from agentrl.core.tool import Tool
from agentrl.core.types import Fork, Message
from agentrl.render.formats.base import Format, to_json, tool_schema
from agentrl.render.parsers.base import CallParser
from agentrl.render.parsers.llama3 import Llama3Parser

BEGIN = "<|begin_of_text|>"
END, END_FOR_TOOL, END_OF_TEXT = "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"

TOOLS = (
    "Given the following functions, please respond with a JSON for a function call "
    "with its proper arguments that best answers the given prompt.\n\n"
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    "Do not use variables.\n\n"
)
"""The tool instructions with which Llama 3.1 and later were trained; before the tools in the first user message."""

RELEASE_DATE = "26 Jul 2024"
"""The date in the templates of Llama 3.1 and 3.3."""


def today() -> str:
    """Return today's date in the format of Llama 3.2's template."""
    return datetime.now().strftime("%d %b %Y")  # local time, as in the template


class Llama3(Format):
    """Llama 3: a header and the trimmed content of every message. It has no tools: they are ignored."""

    name = "llama3"
    ends: tuple[str, ...] = (END, END_FOR_TOOL, END_OF_TEXT)
    closings: tuple[str, ...] = (END, END_FOR_TOOL)
    """See `InterchangeableEnds`. Models end a call with ``<|eom_id|>``, but templates write ``<|eot_id|>``."""
    opens_thinking = False
    parser: CallParser = Llama3Parser()

    @override
    def text(self, messages: Sequence[Message], tools: Sequence[Tool], *, opener: bool = True) -> str:
        if not messages:
            raise ValueError("there is no message")
        return BEGIN + self._conversation_text(messages, tools) + (header("assistant") if opener else "")

    @override
    def boundary(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> str | Fork:
        return END + self._turns(new) + header("assistant")

    def _conversation_text(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        return self._turns(messages)

    def _turns(self, messages: Sequence[Message]) -> str:
        return "".join(turn(message.role, _content(message)) for message in messages)


class Llama31(Llama3):
    """Llama 3.1 and later: a system block with dates, tools in the first user message, results with the role ``ipython``.

    Args:
        name: name of the format in ``render.format``.
        date: today's date in the prompt; fixed for a whole run, so that prompts do not change at midnight.
    """

    name = "llama3.1"

    def __init__(self, name: str = "llama3.1", date: str = RELEASE_DATE) -> None:
        self.name = name
        self._date = date

    def _conversation_text(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        first_message, turns = messages[0], messages[1:]
        system, turns = (first_message.content.strip(), turns) if first_message.role == "system" else ("", messages)
        environment = "Environment: ipython\n" if tools else ""
        dates = f"Cutting Knowledge Date: December 2023\nToday Date: {self._date}\n\n"
        head = turn("system", environment + dates + system)
        if tools:
            if not turns:
                raise ValueError("tools are described in the first user message, and there is none")
            schemas = "".join(f"{to_json(tool_schema(tool), indent=4)}\n\n" for tool in tools)
            head += turn("user", TOOLS + schemas + turns[0].content.strip())  # of any role, as in the template
            turns = turns[1:]
        return head + self._turns(turns)

    def _turns(self, messages: Sequence[Message]) -> str:
        return "".join(_turn(message) for message in messages)


def header(role: str) -> str:
    """Return the header of a message."""
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


def turn(role: str, content: str) -> str:
    """Return the text of one message."""
    return f"{header(role)}{content}{END}"


def _turn(message: Message) -> str:
    if message.tool_calls:
        return turn("assistant", _call(message))
    if message.role == "tool":
        return turn("ipython", to_json(message.content))
    return turn(message.role, _content(message))


def _content(message: Message) -> str:
    """Return the content, in which the template keeps no white space at the ends; a sampled one is kept as it is."""
    return message.content if message.token_ids else message.content.strip()


def _call(message: Message) -> str:
    """Return the call of a message; the template omits its content."""
    if len(message.tool_calls) != 1:
        raise ValueError(f"a message may have one call, and this one has {len(message.tool_calls)}")
    call = message.tool_calls[0]
    return f'{{"name": "{call.name}", "parameters": {to_json(call.arguments)}}}'
