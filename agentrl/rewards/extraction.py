"""Where the answer is in a text. Pure functions that raise for no text."""

from __future__ import annotations

import re

_THINK_END = "</think>"
_BRACES = re.compile(r"\\boxed\s{0,3}\{|\\[{}]|[{}]")
"""The start of a box, escaped braces (which LaTeX prints), and grouping braces."""


def answer_text(turn: str) -> str:
    """Return the answer in a turn: the text after ``</think>``, and in that the content of the last ``<answer>`` tags.

    Without such tags it is the whole text.
    """
    spoken = turn.rpartition(_THINK_END)[2]
    head, closing, _ = spoken.rpartition("</answer>")
    _, opening, inside = head.rpartition("<answer>")
    return (inside if closing and opening else spoken).strip()


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete ``\boxed{…}``, inner braces included, or None if there is none."""
    content = None
    open_braces: list[int | None] = []  # start of a box's content, None for any other brace
    for brace in _BRACES.finditer(text):
        if brace[0] == "}":
            begin = open_braces.pop() if open_braces else None
            if begin is not None:
                content = text[begin : brace.start()].strip()
        elif not brace[0].startswith(("\\{", "\\}")):
            open_braces.append(brace.end() if brace[0].startswith("\\boxed") else None)
    return content
