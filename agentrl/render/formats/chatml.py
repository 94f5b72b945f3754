"""ChatML, and Qwen2.5, which says in it how to call tools.

::

    <|im_start|>system\\n…<|im_end|>\\n<|im_start|>user\\n…<|im_end|>\\n<|im_start|>assistant\\n…<|im_end|>\\n
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.core.tool import Tool
from agentrl.core.types import Fork, Message, ToolCall
from agentrl.render.formats.base import schema_of, to_json
from agentrl.render.parsers.base import CallParser
from agentrl.render.parsers.hermes import CLOSE, OPEN, HermesParser

START, END = "<|im_start|>", "<|im_end|>"
OPENER = f"{START}assistant\n"

HERMES_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within "
    f"{OPEN}{CLOSE} XML tags:\n{OPEN}\n"
    '{{"name": <function-name>, "arguments": <args-json-object>}}\n'
    f"{CLOSE}"
)
"""The wording that Qwen2.5 and Qwen3 were trained with; ``tools`` are JSON schemas, each after a newline."""


class ChatMl:
    """Plain ChatML, as SmolLM2 has it: a system message of its own where there is none, and no tools.

    Args:
        system: the system message that stands where a conversation has none; empty for nothing.
    """

    name = "chatml"
    ends: tuple[str, ...] = (END,)
    opens_thinking = False
    parser: CallParser = HermesParser()

    def __init__(self, system: str = "") -> None:
        self._system = system

    def text(self, messages: Sequence[Message], tools: Sequence[Tool], *, opener: bool = True) -> str:
        """See `Format`. Tools are not part of plain ChatML: they are left out."""
        said = list(messages)
        if self._system and (not said or said[0].role != "system"):
            said.insert(0, Message("system", self._system))
        return "".join(turn(message.role, message.content) for message in said) + (OPENER if opener else "")

    def boundary(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> str | Fork:
        """See `Format`."""
        return f"{END}\n" + "".join(turn(message.role, message.content) for message in new) + OPENER


class Qwen25:
    """Qwen2.5: tools in the system message, results in a user turn."""

    name = "qwen2.5"
    ends: tuple[str, ...] = (END,)
    opens_thinking = False
    parser: CallParser = HermesParser()

    SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    """Stands where a conversation has no system message."""

    def text(self, messages: Sequence[Message], tools: Sequence[Tool], *, opener: bool = True) -> str:
        """See `Format`."""
        system, rest = split_system(messages, self.SYSTEM)
        if tools:
            system += "\n\n" + tools_text(tools)
        return turn("system", system) + self._turns(rest) + (OPENER if opener else "")

    def boundary(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> str | Fork:
        """See `Format`."""
        return f"{END}\n" + self._turns(new) + OPENER

    def _turns(self, messages: Sequence[Message]) -> str:
        return "".join(
            _qwen25_assistant(message) if message.role == "assistant" and message.tool_calls else other(messages, index)
            for index, message in enumerate(messages)
        )


def _qwen25_assistant(message: Message) -> str:
    content = f"\n{message.content}" if message.content else ""
    calls = "".join(f"\n{call_text(call)}" for call in message.tool_calls)
    return f"{START}assistant{content}{calls}{END}\n"


def turn(role: str, content: str) -> str:
    """Return one message."""
    return f"{START}{role}\n{content}{END}\n"


def other(messages: Sequence[Message], index: int) -> str:
    """Return one message as Qwen has it: results of tools that stand side by side share a user turn."""
    message = messages[index]
    if message.role != "tool":
        return turn(message.role, message.content)
    first = index == 0 or messages[index - 1].role != "tool"
    last = index == len(messages) - 1 or messages[index + 1].role != "tool"
    opening, closing = f"{START}user" if first else "", f"{END}\n" if last else ""
    return f"{opening}\n<tool_response>\n{message.content}\n</tool_response>{closing}"


def call_text(call: ToolCall) -> str:
    """Return a call in the Hermes format, as Qwen's templates write it."""
    return f'{OPEN}\n{{"name": "{call.name}", "arguments": {to_json(call.arguments)}}}\n{CLOSE}'


def tools_text(tools: Sequence[Tool]) -> str:
    """Return what the system message says of tools."""
    return HERMES_TOOLS.format(tools="".join(f"\n{to_json(schema_of(tool))}" for tool in tools))


def split_system(messages: Sequence[Message], default: str = "") -> tuple[str, Sequence[Message]]:
    """Return the content of the first message, if it is the system's, else ``default``; and the messages after it."""
    if messages and messages[0].role == "system":
        return messages[0].content, messages[1:]
    return default, messages
