"""How near a text is to the right one, character by character."""

from __future__ import annotations

from difflib import SequenceMatcher

_MOST_CHARS = 4000


def similarity(text: str, right: str) -> float:
    """Return twice the characters of matching blocks by the characters of both texts, 0 to 1; 1: they are equal.

    The blocks are those of `difflib.SequenceMatcher`. Of the text only the first 4,000 characters count: a longer one would take
    long.
    """
    return SequenceMatcher(None, text[:_MOST_CHARS], right, autojunk=False).ratio() if text else 0.0
