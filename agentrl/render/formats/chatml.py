"""ChatML, and Qwen2.5, which adds tool calls to it.

::

    <|im_start|>system\\n…<|im_end|>\\n<|im_start|>user\\n…<|im_end|>\\n<|im_start|>assistant\\n…<|im_end|>\\n
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from agentrl.core.tool import Tool
from agentrl.core.types import Fork, Message, ToolCall
from agentrl.render.formats.base import Format, to_json, tool_schema
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
"""The tool instructions with which Qwen2.5 and Qwen3 were trained; ``tools`` are JSON schemas, each after a newline."""


class ChatMl(Format):
    """Plain ChatML, as for SmolLM2: a default system message, and no tools.

    Args:
        system: system message of conversations without one; empty for none.
    """

    name = "chatml"
    ends: tuple[str, ...] = (END,)
    opens_thinking = False
    parser: CallParser = HermesParser()

    def __init__(self, system: str = "") -> None:
        self._system = system

    @override
    def text(self, messages: Sequence[Message], tools: Sequence[Tool], *, opener: bool = True) -> str:
        """Plain ChatML has no tools: they are ignored."""
        conversation = list(messages)
        if self._system and (not conversation or conversation[0].role != "system"):
            conversation.insert(0, Message("system", self._system))
        return "".join(turn(message.role, message.content) for message in conversation) + (OPENER if opener else "")

    @override
    def boundary(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> str | Fork:
        return f"{END}\n" + "".join(turn(message.role, message.content) for message in new) + OPENER


class Qwen25(Format):
    """Qwen2.5: tools in the system message, results in a user turn."""

    name = "qwen2.5"
    ends: tuple[str, ...] = (END,)
    opens_thinking = False
    parser: CallParser = HermesParser()

    SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    """System message of conversations without one."""

    @override
    def text(self, messages: Sequence[Message], tools: Sequence[Tool], *, opener: bool = True) -> str:
        system, turns = split_system(messages, self.SYSTEM)
        if tools:
            system += "\n\n" + tools_text(tools)
        return turn("system", system) + self._turns(turns) + (OPENER if opener else "")

    @override
    def boundary(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> str | Fork:
        return f"{END}\n" + self._turns(new) + OPENER

    def _turns(self, messages: Sequence[Message]) -> str:
        return "".join(
            _qwen25_assistant(message)
            if message.role == "assistant" and message.tool_calls
            else qwen_turn(messages, index)
            for index, message in enumerate(messages)
        )


def _qwen25_assistant(message: Message) -> str:
    content = f"\n{message.content}" if message.content else ""
    calls = "".join(f"\n{call_text(call)}" for call in message.tool_calls)
    return f"{START}assistant{content}{calls}{END}\n"


def turn(role: str, content: str) -> str:
    """Return the text of one message."""
    return f"{START}{role}\n{content}{END}\n"


def qwen_turn(messages: Sequence[Message], index: int) -> str:
    """Return the text of one message in Qwen's format: adjacent tool results share a user turn."""
    message = messages[index]
    if message.role != "tool":
        return turn(message.role, message.content)
    first = index == 0 or messages[index - 1].role != "tool"
    last = index == len(messages) - 1 or messages[index + 1].role != "tool"
    opening, closing = f"{START}user" if first else "", f"{END}\n" if last else ""
    return f"{opening}\n<tool_response>\n{message.content}\n</tool_response>{closing}"


def call_text(call: ToolCall) -> str:
    """Return a call in the Hermes format of Qwen's templates."""
    return f'{OPEN}\n{{"name": "{call.name}", "arguments": {to_json(call.arguments)}}}\n{CLOSE}'


def tools_text(tools: Sequence[Tool]) -> str:
    """Return the tool instructions of the system message."""
    return HERMES_TOOLS.format(tools="".join(f"\n{to_json(tool_schema(tool))}" for tool in tools))


def split_system(messages: Sequence[Message], default: str = "") -> tuple[str, Sequence[Message]]:
    """Return the content of the system message, or ``default`` if there is none, and the other messages."""
    if messages and messages[0].role == "system":
        return messages[0].content, messages[1:]
    return default, messages
