"""Hermes and Qwen: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from agentrl.core.tool import Tool
from agentrl.core.types import ToolCall
from agentrl.render.parsers.base import (
    CALL_NAME,
    CallParser,
    Piece,
    between,
    join_pieces,
    json_call,
    truncated_call,
    unopened_calls,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(CallParser):
    """Parser of the calls of Hermes 2 Pro, and of Qwen2.5 and later."""

    markers = (OPEN, CLOSE)

    @override
    def calls(self, pieces: Sequence[Piece], tools: Sequence[Tool]) -> list[ToolCall]:
        calls = [
            json_call(join_pieces(body).strip()) if closed else truncated_call(CLOSE)
            for body, closed in between(pieces, OPEN, CLOSE)
        ]
        return calls + unopened_calls(pieces, OPEN, CLOSE, CALL_NAME)
