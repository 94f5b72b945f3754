"""Probe conversations that distinguish chat formats."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.core.tool import Tool
from agentrl.core.types import Message, ToolCall, ToolResult, ToolStatus
from agentrl.render.formats.base import Format


async def never_run(**_: object) -> ToolResult:
    """Function of the tools in probe conversations."""
    return ToolResult("", ToolStatus.ERROR, "tools of probe conversations are not run")


TOOLS = (
    Tool(
        "look_up",
        "Look a word up.",
        {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        never_run,
        1.0,
    ),
    Tool("add", "Add numbers.", {"type": "object", "properties": {"a": {"type": "integer"}}}, never_run, 1.0),
)

_SYSTEM, _ASK, _MORE = Message("system", "sy1"), Message("user", "qa1"), Message("user", "qa2")
_SAID, _THOUGHT = Message("assistant", "as1"), Message("assistant", "<think>\nre1\n</think>\n\nas1")
_CALL = Message("assistant", "", (ToolCall("call_0", "look_up", {"word": "é"}),))
_FOUND = Message("tool", "fo1", tool_call_id="call_0")
_CALLS = Message(
    "assistant", "as2", (ToolCall("call_0", "look_up", {"word": "a"}), ToolCall("call_1", "add", {"a": 1}))
)
_BOTH = (_FOUND, Message("tool", "fo2", tool_call_id="call_1"))

PROBES: Sequence[tuple[tuple[Message, ...], tuple[Tool, ...]]] = (
    ((_ASK,), ()),
    ((_SYSTEM, _ASK), ()),
    ((_ASK, _SAID, _MORE), ()),
    ((_ASK, _THOUGHT, _MORE), ()),
    ((_SYSTEM, _ASK, _SAID, _MORE, _THOUGHT, _ASK), ()),
    ((_SYSTEM, _ASK, _THOUGHT, _SYSTEM, _MORE), ()),
    ((_ASK,), TOOLS),
    ((_SYSTEM, _ASK), TOOLS),
    ((_ASK, _CALL, _FOUND), TOOLS[:1]),
    ((_ASK, _THOUGHT, _MORE, _CALL, _FOUND, _SAID, _ASK), TOOLS[:1]),
    ((_ASK, _CALLS, *_BOTH), TOOLS),
)
"""Messages and tools. A template may refuse some of them; a matching format refuses the same ones."""


def same_text(first: Format, second: Format) -> bool:
    """Return whether two formats write the same text for every probe conversation.

    If ``second`` ignores tools, ``first`` need not: then the two are compared without tools.
    """
    return all(_same(first, second, *probe) for probe in PROBES)


def _same(first: Format, second: Format, messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
    expected = _text(second, messages, tools)
    if _text(first, messages, tools) == expected:
        return True
    return bool(tools) and expected == _text(second, messages, ()) == _text(first, messages, ())


def _text(format: Format, messages: Sequence[Message], tools: Sequence[Tool]) -> str | None:
    try:
        return format.text(messages, tools)
    except ValueError:
        return None
