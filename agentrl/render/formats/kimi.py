"""Kimi K2.

::

    <|im_system|>tool_declare<|im_middle|>[…]<|im_end|><|im_system|>system<|im_middle|>…<|im_end|>
    <|im_user|>user<|im_middle|>…<|im_end|><|im_assistant|>assistant<|im_middle|>…<|im_end|>
    <|im_system|>tool<|im_middle|>## Return of ID\\n…<|im_end|>

without white space between turns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from typing_extensions import override

from agentrl.core.tool import Tool
from agentrl.core.types import Fork, Message, ToolCall
from agentrl.render.formats.base import Format, to_json, tool_schema
from agentrl.render.parsers.base import CallParser
from agentrl.render.parsers.kimi import ARGUMENTS, CLOSE, OPEN, SECTION, SECTION_END, KimiParser

END, MIDDLE = "<|im_end|>", "<|im_middle|>"
_STARTS = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}
_OTHER_START = "<|im_system|>"
OPENER = f"{_STARTS['assistant']}assistant{MIDDLE}"


class KimiK2(Format):
    """Kimi K2 Instruct: the policy numbers its calls, and earlier turns stay unchanged."""

    name = "kimi-k2"
    ends: tuple[str, ...] = (END,)
    opens_thinking = False
    parser: CallParser = KimiParser()

    SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."
    """System message of conversations without one; only this one is followed by a newline."""

    @override
    def text(self, messages: Sequence[Message], tools: Sequence[Tool], *, opener: bool = True) -> str:
        """Tools are JSON with sorted keys, as in the model's tokenizer code."""
        schemas = [tool_schema(tool) for tool in tools]
        tools_json = json.dumps(schemas, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        head = _turn("tool_declare", tools_json) if tools else ""
        if messages and messages[0].role != "system":
            head += _turn("system", self.SYSTEM) + "\n"
        return head + "".join(map(_message, messages)) + (OPENER if opener else "")

    @override
    def boundary(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> str | Fork:
        return END + "".join(map(_message, new)) + OPENER


def _message(message: Message) -> str:
    if message.role == "tool":
        return _turn("tool", f"## Return of {message.tool_call_id or ''}\n{message.content}")
    calls = "".join(_call_text(call, index) for index, call in enumerate(message.tool_calls))
    return _turn(message.role, message.content + (f"{SECTION}{calls}{SECTION_END}" if calls else ""))


def _turn(role: str, content: str) -> str:
    return f"{_STARTS.get(role, _OTHER_START)}{role}{MIDDLE}{content}{END}"


def _call_text(call: ToolCall, index: int) -> str:
    """Return a call; without an id it gets the id that the policy would sample."""
    return f"{OPEN}{call.id or f'functions.{call.name}:{index}'}{ARGUMENTS}{to_json(call.arguments)}{CLOSE}"
