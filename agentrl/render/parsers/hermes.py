"""Hermes and Qwen: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from agentrl.core.tool import Tool
from agentrl.core.types import ToolCall
from agentrl.render.parsers.base import CALL_NAME, CallParser, Piece, closed_calls, json_call

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(CallParser):
    """Parser of the calls of Hermes 2 Pro, and of Qwen2.5 and later."""

    markers = (OPEN, CLOSE)

    @override
    def calls(self, pieces: Sequence[Piece], tools: Sequence[Tool]) -> list[ToolCall]:
        return closed_calls(pieces, OPEN, CLOSE, lambda text: [json_call(text)], CALL_NAME)
