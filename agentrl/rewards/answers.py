"""Scores of short answers: exact match, F1, numbers. Pure functions; none raises over what a policy said."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_THINK_END = "</think>"
_BRACES = re.compile(r"\\boxed\s{0,3}\{|\\[{}]|[{}]")
"""What opens a box, braces that LaTeX shows, and braces that group."""


def normalize(text: str) -> str:
    """Return ``text`` in lower case without ASCII punctuation and English articles, with single spaces.

    The normalisation of SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250).
    Example: ``normalize("The  Eiffel-Tower!") == "eiffeltower"``.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(answer: str, accepted: Iterable[str]) -> float:
    """Return 1.0 where the normalised ``answer`` equals one of the normalised ``accepted`` strings, else 0.0.

    An answer of which normalisation leaves nothing never matches.
    """
    said = normalize(answer)
    return float(bool(said) and any(said == normalize(text) for text in accepted))


def f1(answer: str, accepted: Iterable[str]) -> float:
    """Return the best F1 of the normalised words of ``answer`` with those of an ``accepted`` string (SQuAD's).

    From 0.0 (no word in common) to 1.0 (the same words, in any order).
    """
    said = normalize(answer).split()
    return max((_f1(said, normalize(text).split()) for text in accepted), default=0.0)


def _f1(said: list[str], right: list[str]) -> float:
    common = sum((Counter(said) & Counter(right)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(said), common / len(right)
    return 2 * precision * recall / (precision + recall)


def answer_text(said: str) -> str:
    """Return the part of a turn that answers: what stands behind ``</think>``, and within the last ``<answer>`` tags.

    Without such marks that is all of it.
    """
    spoken = said.rpartition(_THINK_END)[2]
    head, closing, _ = spoken.rpartition("</answer>")
    _, opening, inside = head.rpartition("<answer>")
    return (inside if closing and opening else spoken).strip()


def last_boxed(text: str) -> str | None:
    r"""Return what stands in the last whole ``\boxed{…}``, inner braces included, or None where there is none."""
    found = None
    open_braces: list[int | None] = []  # where the content of a box begins, None for any other brace
    for brace in _BRACES.finditer(text):
        if brace[0] == "}":
            begin = open_braces.pop() if open_braces else None
            if begin is not None:
                found = text[begin : brace.start()].strip()
        elif not brace[0].startswith(("\\{", "\\}")):
            open_braces.append(brace.end() if brace[0].startswith("\\boxed") else None)
    return found
