"""DeepSeek V3, R1 and V3.1: calls in special tokens.

::

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json\\n{…}\\n```<｜tool▁call▁end｜>…<｜tool▁calls▁end｜>

V3.1 omits type and fence: ``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>``.
"""

from __future__ import annotations

from collections.abc import Sequence

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

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
TYPE = "function"
"""The type of every call of V3 and R1."""
FENCE, FENCE_END = "\n```json\n", "\n```"


class DeepSeekParser(CallParser):
    """Parser of the calls of DeepSeek V3, R1 and V3.1."""

    markers = (CALLS, CALLS_END, CALL, CALL_END, SEP)

    @override
    def calls(self, pieces: Sequence[Piece], tools: Sequence[Tool]) -> list[ToolCall]:
        calls: list[ToolCall] = []
        outside = 0
        for start, end, closed in _sections(pieces):
            calls += _outside(pieces[outside:start])
            calls += _section(pieces[start + 1 : end], closed)
            outside = end
        calls += _outside(pieces[outside:])
        return calls + unopened_calls(pieces, CALL, CALL_END, Piece(SEP, marker=True), needs_closing=False)


def _sections(pieces: Sequence[Piece]) -> list[tuple[int, int, bool]]:
    """Return start and end of each section of calls, and whether it is closed; a second opening continues a section."""
    sections: list[tuple[int, int, bool]] = []
    start: int | None = None
    for index, piece in enumerate(pieces):
        if start is None and _is(piece, CALLS):
            start = index
        elif start is not None and _is(piece, CALLS_END):
            sections.append((start, index, True))
            start = None
    return sections if start is None else [*sections, (start, len(pieces), False)]


def _section(pieces: Sequence[Piece], closed: bool) -> list[ToolCall]:
    calls = [
        _call(body) if closed_call else truncated_call(CALL_END, _name(body))
        for body, closed_call in between(pieces, CALL, CALL_END)
    ]
    if calls:
        return calls
    return [unreadable_call(f"there is no {CALL} in the tool calls") if closed else truncated_call(CALLS_END)]


def _outside(pieces: Sequence[Piece]) -> list[ToolCall]:
    """Return calls outside of sections as attempts: engines look for calls in sections only."""
    fault = f"the call does not stand between {CALLS} and {CALLS_END}"
    return [
        unreadable_call(fault, _name(body)) if closed_call else truncated_call(CALL_END, _name(body))
        for body, closed_call in between(pieces, CALL, CALL_END)
    ]


def _call(body: Sequence[Piece]) -> ToolCall:
    seps = [index for index, piece in enumerate(body) if _is(piece, SEP)]
    if len(seps) != 1:
        return unreadable_call(f"the call has {len(seps)} {SEP}, and needs one: {TYPE}{SEP}NAME")
    call_type, text = join_pieces(body[: seps[0]]).strip(), join_pieces(body[seps[0] + 1 :]).strip()
    if call_type and call_type != TYPE and text.startswith("{") and not any(piece.marker for piece in body[: seps[0]]):
        return named_call(call_type, text)
    name, fence, arguments = text.partition(FENCE)
    if call_type != TYPE or not fence or not arguments.endswith(FENCE_END) or not name.strip() or "\n" in name.strip():
        return unreadable_call(
            f"the call is not of the form {TYPE}{SEP}NAME, a line ```json, the arguments as a JSON object, a line ```",
            _name(body),
        )
    return named_call(name.strip(), arguments.removesuffix(FENCE_END))


def _name(body: Sequence[Piece]) -> str:
    """Return the name of a call that cannot be parsed, if it is on a complete line; otherwise an empty string."""
    text = join_pieces(body)
    head, _, after_separator = text.partition(SEP)
    name, newline, _ = after_separator.partition("\n")
    return name.strip() if head.strip() == TYPE and newline else ""


def _is(piece: Piece, marker: str) -> bool:
    return piece.marker and piece.text == marker
