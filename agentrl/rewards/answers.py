"""Scores of short answers: exact match, F1, boxed answers. Pure functions that raise for no text."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_THINK_END = "</think>"
_BRACES = re.compile(r"\\boxed\s{0,3}\{|\\[{}]|[{}]")
"""The start of a box, escaped braces (which LaTeX prints), and grouping braces."""


def normalize(text: str) -> str:
    """Return ``text`` in lower case without ASCII punctuation and English articles, with single spaces.

    The normalisation of SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250).
    Example: ``normalize("The  Eiffel-Tower!") == "eiffeltower"``.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(answer: str, accepted: Iterable[str]) -> float:
    """Return 1.0 if the normalised ``answer`` equals one of the normalised ``accepted`` strings, else 0.0.

    An answer that is empty after normalisation never matches.
    """
    normalized = normalize(answer)
    return float(bool(normalized) and any(normalized == normalize(text) for text in accepted))


def f1(answer: str, accepted: Iterable[str]) -> float:
    """Return the F1 (SQuAD) of the normalised words of ``answer`` with an ``accepted`` string; the best of several.

    From 0.0 (no word in common) to 1.0 (the same words, in any order).
    """
    words = normalize(answer).split()
    return max((_f1(words, normalize(text).split()) for text in accepted), default=0.0)


def _f1(words: list[str], right: list[str]) -> float:
    common = sum((Counter(words) & Counter(right)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(words), common / len(right)
    return 2 * precision * recall / (precision + recall)


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
