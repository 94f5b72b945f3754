"""Where the answer is in a text. Pure functions that raise for no text."""

from __future__ import annotations

import re

_THINK, _THINK_END = "<think>", "</think>"
_BRACES = re.compile(r"\\f?box(?:ed)?\s{0,3}\{|\\\\(?!f?box)|\\[{}]|[{}]")
"""The start of a box, line breaks, escaped braces (which LaTeX prints), and grouping braces."""


def answer_text(turn: str) -> str:
    """Return the answer in a turn: the text after ``</think>``, and in that the content of the last ``<answer>`` tags.

    Without such tags it is the whole text. What follows a ``<think>`` that is not closed is no answer.
    """
    spoken = turn.rpartition(_THINK_END)[2].partition(_THINK)[0]
    head, closing, _ = spoken.rpartition("</answer>")
    _, opening, inside = head.rpartition("<answer>")
    return (inside.partition("</answer>")[0] if closing and opening else spoken).strip()


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete ``\boxed{…}`` or ``\fbox{…}``, inner braces included; None if there is none."""
    content = None
    open_braces: list[int | None] = []  # start of a box's content, None for any other brace
    for brace in _BRACES.finditer(text):
        if brace[0] == "}":
            begin = open_braces.pop() if open_braces else None
            if begin is not None:
                content = text[begin : brace.start()].strip()
        elif brace[0].endswith("{") and brace[0] != "\\{":
            open_braces.append(None if brace[0] == "{" else brace.end())
    return content
