"""Positions of closing brackets and of markers in sampled text, which may be malformed."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence

from agentrl.render.parsers.base import Piece

_JSON = r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)'
_PYTHON = (
    r'"""(?:[^\\]|\\.)*?(?:"""|\\?\Z)'
    r"|'''(?:[^\\]|\\.)*?(?:'''|\\?\Z)"
    rf"|{_JSON}"
    r"|'(?:[^'\\]|\\.)*(?:'|\\?\Z)"
)
_BRACKET = r"|[\[({]|[\])}]"
JSON = re.compile(_JSON + _BRACKET, re.DOTALL)
"""Strings and brackets of JSON."""
PYTHON = re.compile(_PYTHON + _BRACKET, re.DOTALL)
"""Strings and brackets of Python."""


def closing(text: str, start: int, language: re.Pattern[str]) -> int | None:
    """Return the index after the bracket that closes the one at ``start``, or None if none does.

    Brackets in strings are ignored, and every kind of bracket closes every other. Linear in the text, without recursion.

    Args:
        text: text to scan.
        start: index of an opening bracket.
        language: `JSON` or `PYTHON`.
    """
    depth = 0
    for match in language.finditer(text, start):
        if match[0] in "[({":
            depth += 1
        elif match[0] in "])}":
            depth -= 1
            if depth == 0:
                return match.end()
    return None


def positions(pieces: Sequence[Piece], marker: str) -> list[int]:
    """Return the positions of a marker in the text of ``pieces``, in order."""
    starts: list[int] = []
    at = 0
    for piece in pieces:
        if piece.marker and piece.text == marker:
            starts.append(at)
        at += len(piece.text)
    return starts


def next_position(positions: Sequence[int], at: int, default: int) -> int:
    """Return the first of sorted positions from ``at`` on."""
    index = bisect_left(positions, at)
    return positions[index] if index < len(positions) else default
