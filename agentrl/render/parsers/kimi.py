"""Kimi K2: ``<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{…}<|tool_call_end|>`` in a section."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from typing_extensions import override

from agentrl.core.tool import Tool
from agentrl.core.types import ToolCall
from agentrl.render.parsers.base import (
    CallParser,
    Piece,
    between,
    join_pieces,
    named_call,
    truncated_call,
    unopened_calls,
    unreadable_call,
)

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
OPEN, ARGUMENTS, CLOSE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

_ID = re.compile(r"(?:functions\.)?(?P<name>\S+):\d+")


class KimiParser(CallParser):
    """Parser of the calls of Kimi K2. Calls keep the sampled ids, which contain the function's name."""

    markers = (SECTION, SECTION_END, OPEN, ARGUMENTS, CLOSE)

    @override
    def calls(self, pieces: Sequence[Piece], tools: Sequence[Tool]) -> list[ToolCall]:
        calls = [_call(body, closed) for body, closed in between(pieces, OPEN, CLOSE)]
        has_open_section = not calls and any(not closed for _, closed in between(pieces, SECTION, SECTION_END))
        calls += unopened_calls(pieces, OPEN, CLOSE, Piece(ARGUMENTS, marker=True), needs_closing=False)
        return [truncated_call(SECTION_END)] if has_open_section and not calls else calls


def _call(body: Sequence[Piece], closed: bool) -> ToolCall:
    marker_index = next((index for index, piece in enumerate(body) if piece.marker), len(body))
    id = join_pieces(body[:marker_index]).strip()
    id_match = _ID.fullmatch(id)
    if not closed:
        return replace(truncated_call(CLOSE, id_match["name"] if id_match else ""), id=id if id_match else "")
    if id_match is None:
        return unreadable_call(f"the call has the id {id[:80]!r}, not one such as functions.NAME:0")
    if marker_index == len(body) or body[marker_index].text != ARGUMENTS:
        return replace(unreadable_call(f"the call {id} has no {ARGUMENTS}", id_match["name"]), id=id)
    return replace(named_call(id_match["name"], join_pieces(body[marker_index + 1 :])), id=id)
