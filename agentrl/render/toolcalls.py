"""Tool calls in what a policy said, in the Hermes format: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

from __future__ import annotations

import json
import re

from agentrl.types import ToolCall

MARKUP = "<tool_call>"
"""What opens a call."""
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_THINK_END = "</think>"


def hermes_calls(text: str) -> tuple[ToolCall, ...]:
    """Return the well-formed calls in ``text``, numbered ``call_0``, ``call_1`` …; malformed ones are left out.

    What stands before the last ``</think>`` is reasoning, and calls nothing.
    """
    spoken = text.rpartition(_THINK_END)[2]
    calls: list[ToolCall] = []
    for match in _CALL.finditer(spoken):
        try:
            call = json.loads(match[1])
        except (json.JSONDecodeError, RecursionError):
            continue
        name, arguments = call.get("name"), call.get("arguments", {})
        if isinstance(name, str) and isinstance(arguments, dict):
            calls.append(ToolCall(f"call_{len(calls)}", name, arguments))
    return tuple(calls)
