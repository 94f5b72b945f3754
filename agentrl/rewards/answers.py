"""Scores of short answers: exact match and F1. Pure functions that raise for no text."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable

from agentrl.rewards.characters import plain_characters
from agentrl.rewards.numbers import whole_number

_SQUAD_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_QUOTED = re.compile(r"\s*([\"'`]|\*{1,2})(.*)\1\.?\s*", re.DOTALL)
"""Quotes and Markdown's emphasis around all of a text."""
_THOUSANDS = re.compile(r"(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3})")
_CHOICE = re.compile(r"[(\[]?([^\W\d_])[)\]]?[.:)]?")
_AFTER_LETTERS = re.compile(r"\w[^\W\d_][!\"]+\Z")
"""Marks at the end of a word that are punctuation there; ``5!`` and ``6"`` are something else."""


def normalize(text: str) -> str:
    """Return ``text`` so that different spellings of one answer are equal, and different answers stay different.

    A text that is one number becomes its value, one that is one letter (``(B)``, ``b.``) that letter. Of other texts the case,
    the Unicode normal form, the width of characters, quotes and Markdown's emphasis around the text, punctuation at the ends of
    words, and articles before a word do not count. Signs, decimal points, brackets and all other characters do.
    Example: ``normalize("The  Eiffel Tower!") == "eiffel tower"``.
    """
    text = plain_characters(_THOUSANDS.sub("", text)).strip()
    quoted = _QUOTED.fullmatch(text)
    text = quoted[2] if quoted and quoted[1] not in quoted[2] else text
    letter, number = choice_letter(text), whole_number(text)
    if letter is not None:
        return unicodedata.normalize("NFC", letter.casefold())
    if number is not None:
        return number
    words = [_strip(word) for word in re.sub(r"(?<=[0-9]) {1,3}(?=%)", "", text).split()]
    words = [word for word in words if word]
    kept = [word for index, word in enumerate(words) if not _is_article(words, index)]
    return unicodedata.normalize("NFC", " ".join(kept).casefold())


def choice_letter(text: str) -> str | None:
    """Return the letter of a text that is one letter, such as ``B``, ``(B)`` or ``B.``; None for other texts."""
    match = _CHOICE.fullmatch(text)
    return match[1] if match else None


def _strip(word: str) -> str:
    word = word.lstrip('"').rstrip(".,;:?")
    return word.rstrip('!".,;:?') if _AFTER_LETTERS.search(word[-8:]) else word


def _is_article(words: list[str], index: int) -> bool:
    """Return whether a word is an article of the next one; ``A`` is a name in ``vitamin A`` and ``hepatitis A virus``."""
    word, following = words[index], words[index + 1 : index + 2]
    if word.casefold() in ("an", "the"):
        return bool(following)
    return (word == "a" or (word == "A" and index == 0)) and bool(following) and following[0][1:2].isalpha()


def squad_normalize(text: str) -> str:
    """Return ``text`` in lower case without ASCII punctuation and English articles, with single spaces.

    The normalisation of SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250). It joins different numbers: 3.5 is 35, and -5 is 5.
    Example: ``squad_normalize("The  Eiffel-Tower!") == "eiffeltower"``.
    """
    return " ".join(_SQUAD_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(answer: str, accepted: Iterable[str], normalization: Callable[[str], str] = normalize) -> float:
    """Return 1.0 if the normalised ``answer`` equals one of the normalised ``accepted`` strings, else 0.0.

    An answer that is empty after normalisation never matches.
    """
    normalized = normalization(answer)
    return float(bool(normalized) and any(normalized == normalization(text) for text in accepted))


def f1(answer: str, accepted: Iterable[str], normalization: Callable[[str], str] = normalize) -> float:
    """Return the F1 of the normalised words of ``answer`` with an ``accepted`` string; the best of several.

    From 0.0 (no word in common) to 1.0 (the same words, in any order).
    """
    words = normalization(answer).split()
    return max((_f1(words, normalization(text).split()) for text in accepted), default=0.0)


def _f1(words: list[str], right: list[str]) -> float:
    common = sum((Counter(words) & Counter(right)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(words), common / len(right)
    return 2 * precision * recall / (precision + recall)
