"""Hunyuan: a JSON list in ``<tool_calls>`` (A13B), or names, keys and values in tags as in GLM-4.5 (Hy3)."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from agentrl.core.tool import Tool
from agentrl.core.types import ToolCall
from agentrl.render.parsers.base import CALL_NAME, CallParser, Piece, closed_calls
from agentrl.render.parsers.glm import CLOSE, KEY, KEY_END, OPEN, VALUE, VALUE_END, GlmParser
from agentrl.render.parsers.json_lists import list_calls

SECTION, SECTION_END, SEP = "<tool_calls>", "</tool_calls>", "<tool_sep>"
SUFFIX = ":opensource"
"""Ends the name of every token of Hy3."""

_PLAIN = (SECTION, SECTION_END, SEP, OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)
_TAGS = {f"{marker[:-1]}{SUFFIX}>": marker for marker in _PLAIN}


class HunyuanParser(CallParser):
    """Parser of the calls of Hunyuan A13B and of Hy3, whose tags end with ``:opensource``::

    <tool_calls>[{"name": NAME, "arguments": {…}}, …]</tool_calls>
    <tool_calls><tool_call>NAME<tool_sep><arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>…</tool_calls>
    """

    markers = (*_PLAIN, *_TAGS)
    reasoning = (("<think>", "</think>"), (f"<think{SUFFIX}>", f"</think{SUFFIX}>"))

    @override
    def calls(self, pieces: Sequence[Piece], tools: Sequence[Tool]) -> list[ToolCall]:
        plain = [Piece(_TAGS.get(piece.text, piece.text), marker=True) if piece.marker else piece for piece in pieces]
        if not any(piece.marker and piece.text in (OPEN, CLOSE) for piece in plain):
            return closed_calls(plain, SECTION, SECTION_END, list_calls, CALL_NAME)
        skipped = (SECTION, SECTION_END, SEP)
        return GlmParser().calls([piece for piece in plain if not piece.marker or piece.text not in skipped], tools)
