"""Characters that differ in their code point only: full width, minus signs, hyphens, quotes, spaces, and invisible ones."""

from __future__ import annotations

import unicodedata

_PLAIN = (
    {0xFEE0 + code: code for code in range(ord("!"), ord("~") + 1)}
    | dict.fromkeys(map(ord, "−–﹣‐‑"), "-")
    | dict.fromkeys(map(ord, "‘’ʼ"), "'")
    | dict.fromkeys(map(ord, "“”„«»"), '"')
    | dict.fromkeys(map(ord, "\u200b\ufeff\u00ad\u2060"))
    | {ord("。"): ".", ord("、"): ",", ord("…"): "..."}
)
SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻"
"""Superscript digits and signs."""
SUPERSCRIPT_DIGITS = str.maketrans(SUPERSCRIPTS, "0123456789+-")
"""What they stand for."""
VULGAR = "[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒]"
"""Fractions that are one character."""


def plain_characters(text: str) -> str:
    """Return ``text`` in Unicode's form NFC with ASCII characters for those that look alike: ``−5。`` is ``-5.``.

    Characters that mean something else stay, such as superscripts and digits of other scripts.
    """
    return unicodedata.normalize("NFC", text).translate(_PLAIN)


def vulgar_fraction(character: str) -> str:
    r"""Return a fraction that is one character in LaTeX, such as ``\frac{1}{2}``."""
    top, bottom = unicodedata.normalize("NFKC", character).split("\N{FRACTION SLASH}")
    return rf"\frac{{{top}}}{{{bottom}}}"
