"""The score of an answer: exact match after SQuAD normalisation (Rajpurkar et al. 2016, arXiv 1606.05250)."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Return ``text`` in lower case without ASCII punctuation and English articles, with single spaces.

    Example: ``normalize("The  Eiffel-Tower!") == "eiffeltower"``.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(answer: str, accepted: Iterable[str]) -> float:
    """Return 1.0 where the normalised ``answer`` equals one of the normalised ``accepted`` strings, else 0.0.

    An answer of which normalisation leaves nothing never matches.
    """
    said = normalize(answer)
    return float(bool(said) and any(said == normalize(text) for text in accepted))
