r"""Notation that math-verify misreads: words as products of letters, units as nothing, percent as either of two numbers."""

from __future__ import annotations

import re
import unicodedata

from agentrl.rewards.answers import choice_letter, normalize

_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox|operatorname)\s{0,3}\{([^{}]*)\}")
_SPACING = re.compile(r"\\[,!;: ]|[~$]|\\left|\\right")
_WORDS = re.compile(r"[^\W\d_]+(?:[ ,.'’-]+[^\W_]+)*\.?")
"""Words, and numbers after the first one."""
_FUNCTIONS = re.compile(r"(?i)(sin|cos|tan|cot|sec|csc)h?|log|exp|sqrt|max|min|gcd|lcm|det|inf(ini)?ty|infinity|inf|pi")
_PERCENT = re.compile(r"(.*?)\s{0,3}\\?%", re.DOTALL)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_SUPERSCRIPT = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_VULGAR = re.compile(r"[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒]")
_BASE = re.compile(r"(?<=\w)_\{?([0-9]+)\}?$")
_UNIT = re.compile(r"(?<=[0-9}.)])\s{0,3}([a-z]+)\.?(?:\^\{?([0-9])\}?)?$", re.IGNORECASE)
_SPELLINGS = """
mm millimeter millimetre; cm centimeter centimetre; m meter metre; km kilometer kilometre; in inch; inches; ft foot; feet;
yd yard; mi mile; mg milligram; g gram; kg kilogram; lb pound; oz ounce; ml milliliter millilitre; l liter litre;
ms millisecond; s second sec; min minute; h hour hr; day; week; month; year; mph; kmh kph
"""
_ALIASES = {"inches": "in", "feet": "ft"}
_UNITS = {
    spelling: _ALIASES.get(words[0], words[0])
    for words in map(str.split, _SPELLINGS.split(";"))
    for word in words
    for spelling in (word, f"{word}s")
}
_BRACKETS = {"(": "interval", "[": "interval", "\\{": "set"}


def rewrite(text: str) -> str:
    r"""Return an expression in the notation that math-verify reads: ``4\%`` as ``\frac{4}{100}``, ``x²`` as ``x^{2}``."""
    text = unicodedata.normalize("NFC", text).strip()
    text = choice_letter(text) or text.removesuffix(".").rstrip() or text
    text = _SUPERSCRIPT.sub(lambda power: f"^{{{power[0].translate(_SUPERSCRIPTS)}}}", text)
    text = _VULGAR.sub(lambda match: rf"\frac{{{_vulgar(match[0])}}}", text)
    percent = _PERCENT.fullmatch(text.removeprefix("$").removesuffix("$"))
    return rf"\frac{{{percent[1]}}}{{100}}" if percent else text


def _vulgar(fraction: str) -> str:
    return unicodedata.normalize("NFKC", fraction).replace("\N{FRACTION SLASH}", "}{")


def compare_words(answer: str, label: str) -> bool | None:
    """Return whether two texts of words are the same text; None if one of them is no text of words.

    One letter, two, or three consonants may be a product; names of functions are no words either.
    """
    words = [_TEXT.sub(r"\1", _SPACING.sub(" ", text)).strip() for text in (answer, label)]
    if not all(_WORDS.fullmatch(text) and _has_word(text) for text in words):
        return None
    return normalize(words[0]) == normalize(words[1])


def _has_word(text: str) -> bool:
    words = (word for word in re.findall(r"[^\W\d_]+", text) if not _FUNCTIONS.fullmatch(word))
    return any(len(word) > 3 or (len(word) == 3 and re.search("[aeiou]", word, re.IGNORECASE)) for word in words)


def differ(answer: str, label: str) -> bool:
    """Return whether two expressions differ in what math-verify overlooks: units, the base of numbers, sets and intervals."""
    forms = [_TEXT.sub(r"\1", _SPACING.sub(" ", text)).strip() for text in (answer, label)]
    brackets = [next((kind for start, kind in _BRACKETS.items() if form.startswith(start)), None) for form in forms]
    bases = [_BASE.search(form) for form in forms]
    units = [_unit(form) for form in forms]
    return (
        (None not in brackets and brackets[0] != brackets[1])
        or (bases[0] and bases[0][1]) != (bases[1] and bases[1][1])
        or ("" not in units and units[0] != units[1])
    )


def _unit(text: str) -> str:
    match = _UNIT.search(text)
    unit = _UNITS.get(match[1].lower(), "") if match else ""
    return f"{unit}^{match[2] or 1}" if match and unit else ""
