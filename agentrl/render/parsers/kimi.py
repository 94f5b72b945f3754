"""Kimi K2: ``<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{…}<|tool_call_end|>`` in a section."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from typing_extensions import override

from agentrl.core.tool import Tool
from agentrl.core.types import ToolCall
from agentrl.render.parsers.base import CallParser, Piece, between, named_call, text_of, truncated, unreadable

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
OPEN, ARGUMENTS, CLOSE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

_ID = re.compile(r"(?:functions\.)?(?P<name>\S+):\d+")


class KimiParser(CallParser):
    """Parser of the calls of Kimi K2. Calls keep the sampled ids, which contain the function's name."""

    markers = (SECTION, SECTION_END, OPEN, ARGUMENTS, CLOSE)

    @override
    def calls(self, pieces: Sequence[Piece], tools: Sequence[Tool]) -> list[ToolCall]:
        calls = [_call(body, closed) for body, closed in between(pieces, OPEN, CLOSE)]
        begun = not calls and any(not closed for _, closed in between(pieces, SECTION, SECTION_END))
        return [truncated(SECTION_END)] if begun else calls


def _call(body: Sequence[Piece], closed: bool) -> ToolCall:
    divided = next((index for index, piece in enumerate(body) if piece.marker), len(body))
    id = text_of(body[:divided]).strip()
    known = _ID.fullmatch(id)
    if not closed:
        return replace(truncated(CLOSE, known["name"] if known else ""), id=id if known else "")
    if known is None:
        return unreadable(f"the call has the id {id[:80]!r}, not one such as functions.NAME:0")
    if divided == len(body) or body[divided].text != ARGUMENTS:
        return replace(unreadable(f"the call {id} has no {ARGUMENTS}", known["name"]), id=id)
    return replace(named_call(known["name"], text_of(body[divided + 1 :])), id=id)
