r"""Notation that math-verify misreads: words as products of letters, units as nothing, percent as either of two numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from agentrl.rewards.answers import choice_letter, normalize
from agentrl.rewards.characters import SUPERSCRIPT_DIGITS, SUPERSCRIPTS, VULGAR, plain_characters, vulgar_fraction
from agentrl.rewards.numbers import SCALES, THOUSANDS, whole_value

_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox|operatorname|underline)\s{0,3}\{([^{}]*)\}")
_NOUN = re.compile(rf"(?i)\\text\s?\{{\s{{0,3}}(?!\s|{'|'.join(SCALES)}|per)[a-z ]+\}}$")
_SPACING = re.compile(r"\\[,!;: ]|[~$]|\\left|\\right")
_WORDS = re.compile(r"[^\W\d_]+(?:[ ,.'’-]+[^\W_]+)*\.?")
"""Words, and numbers after the first one."""
_FUNCTIONS = re.compile(r"(?i)(sin|cos|tan|cot|sec|csc)h?|log|exp|sqrt|max|min|gcd|lcm|det|inf(ini)?ty|infinity|inf|pi")
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}|[0-9]{1,2}([/.-])[0-9]{1,2}\1[0-9]{4}")
_SUPERSCRIPT, _VULGAR, _THOUSANDS = re.compile(f"[{SUPERSCRIPTS}]+"), re.compile(VULGAR), re.compile(THOUSANDS)
_LEFT_SIDE = re.compile(r"\s{0,3}([a-zA-Z]|\\[a-z]{2,8})\s{0,3}=")
_PERCENT = re.compile(r"(.*=)?(.*?)\s{0,3}(?:\\?%|\s(?:\\text\s?\{\s?)?per\s?cent\}?)", re.DOTALL)
_Replacement = str | Callable[[re.Match[str]], str]
_SIGNS = {"∞": "infty", "∪": "cup", "∩": "cap", "∈": "in", "≠": "neq", "±": "pm", "×": "times", "·": "cdot"}
_PATTERNS: tuple[tuple[str, _Replacement], ...] = (
    (
        rf"(?i)(?<=[0-9}}])\s{{0,3}}(?:\\text\s?\{{)?\s{{0,3}}({'|'.join(SCALES)})\b\}}?",
        lambda match: rf" \times {SCALES[match[1].lower()]} ",
    ),
    (
        r"(?<![0-9])([0-9]{0,20})\.([0-9]{0,20})\\overline\s?\{([0-9]{1,20})\}",
        lambda match: _repeating(*match.groups()),
    ),
    (r"√\s?(?:\{([^{}]*)\}|\(([^()]*)\)|([0-9]+|[a-z]))", r"\\sqrt{\1\2\3}"),
    (r"(?:°|\\degree)", r"^{\\circ}"),
    (r"\\varnothing|∅", r"\\emptyset"),
    (r"\\lang(?:le)?(?![a-z])", "("),
    (r"\\rang(?:le)?(?![a-z])", ")"),
    (r"\\log_\{?e\}?", r"\\ln "),
    (r"\\(?:mathrm|rm|operatorname)\s?\{([ie])\}", r"\1"),
    (r"(?<![\\a-zA-Z])(sin|cos|tan|log|ln)(?=\s?[({^]|\s[a-z]\b)", r"\\\1"),
    (r"(?<![\\a-zA-Z])(pi)(?![a-zA-Z])", r"\\\1"),
    (f"[{''.join(_SIGNS)}]", lambda match: rf"\{_SIGNS[match[0]]} "),
)
_REWRITES = tuple((re.compile(pattern), replacement) for pattern, replacement in _PATTERNS)
_BASE = re.compile(r"(?<=\w)_\{?([0-9]+)\}?$")
_SPELLINGS = """
mm millimeter millimetre; cm centimeter centimetre; m meter metre; km kilometer kilometre; in inch; inches; ft foot; feet;
yd yard; mi mile; mg milligram; g gram; kg kilogram; lb pound; oz ounce; ml milliliter millilitre; l liter litre;
ms millisecond; s second sec; min minute; h hour hr; day; week; month; year; mph; kmh kph; degree deg; rad radian;
dollar; cent; euro €; am; pm
"""
_ALIASES = {"inches": "in", "feet": "ft"}
_UNITS = {
    spelling: _ALIASES.get(words[0], words[0])
    for words in map(str.split, _SPELLINGS.split(";"))
    for word in words
    for spelling in (word, f"{word}s")
}
_UNIT_WORD = r"([a-z€]+)\.?(?:\s?\^\s?\{?([0-9])\}?)?"
_UNIT = re.compile(
    rf"(?:(?<=[0-9}}.)])|(?<=illion)|(?<=thousand))\s{{0,3}}(?:(square|cubic)\s)?{_UNIT_WORD}(?:\s{{0,2}}(?:/|per\s)\s?{_UNIT_WORD})?$",
    re.IGNORECASE,
)
_DEGREES = re.compile(r"\s?(?:°|\\degree|\^\s?\{?\s?\\circ\s?\}?)$")
_CURRENCY = re.compile(r"(-?)(?:(\\?\$)|€)\s?(?=[0-9.])")
_ALTERNATIVE = re.compile(
    r"\\(?:lor|vee|land|wedge|to|rightarrow|parallel|oplus)\b|[∨∧→∥∣ǀ⊕]|[0-9]\s{0,3}\\equiv|[0-9]\s{0,3}\\text\s?\{[^{}0-9]{0,99}[0-9]"
)
"""What stands between several answers. Of all of them but one math-verify reads only the last or the first."""
_BRACKETS = {"(": "interval", "[": "interval", "\\{": "set"}
_RELATIONS = {
    spelling: relation
    for relation, spellings in {
        "≠": r"\neq \ne",
        "≥": r"\geqslant \geq \ge",
        "≤": r"\leqslant \leq \le",
        ">": "",
        "<": "",
    }.items()
    for spelling in (*spellings.split(), relation)
}
_TOLERANCE, _RELATIVE_TOLERANCE = Fraction(1, 2 * 10**6), Fraction(1, 10**4)
"""Absolute tolerance of numbers that are rounded, as that of math-verify; the other one keeps small numbers apart."""


def rewrite(text: str) -> str:
    r"""Return an expression in the notation that math-verify reads: ``4\%`` as ``\frac{4}{100}``, ``x²`` as ``x^{2}``."""
    text = _bare(text)
    percent = _PERCENT.fullmatch(text)
    if percent is None:
        text = _split_unit(text)[0]
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    percent = _PERCENT.fullmatch(text)
    return rf"{percent[1] or ''}\frac{{{percent[2]}}}{{100}}" if percent else text


def _bare(text: str) -> str:
    """Return an expression without what is around it: dollar signs of LaTeX, Markdown's emphasis, a full stop."""
    text = plain_characters(_THOUSANDS.sub("", text)).strip().rstrip("\\~ ")
    text = text[whole.start(1) : whole.end(1)] if (whole := _TEXT.fullmatch(text)) else text
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(SUPERSCRIPT_DIGITS)}}}", text)
    text = _VULGAR.sub(lambda match: vulgar_fraction(match[0]), text)
    for mark in ("**", "`", "$"):
        if (
            len(text) > 2 * len(mark)
            and text.startswith(mark)
            and text.endswith(mark)
            and not text.endswith(f"\\{mark}")
        ):
            text = text[len(mark) : -len(mark)].strip()
    return choice_letter(text) or text.removesuffix(".").rstrip() or text


def _repeating(whole: str, digits: str, period: str) -> str:
    r"""Return ``0.1\overline{6}`` as a fraction."""
    nines = 10 ** len(period) - 1
    value = Fraction(f"{whole or 0}.{digits or 0}") + Fraction(int(period), nines * 10 ** len(digits))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def compare_words(answer: str, label: str) -> bool | None:
    """Return whether two texts of words, or dates, are the same text; None if they are neither.

    One letter, two, or three consonants may be a product; names of functions are no words either.
    """
    words = [_TEXT.sub(r"\1", _SPACING.sub(" ", _bare(text))).strip() for text in (answer, label)]
    are_words = all(map(_WORDS.fullmatch, words)) and any(map(_has_word, words))
    if not are_words and not any(map(_DATE.fullmatch, words)):
        return None
    return normalize(words[0]) == normalize(words[1])


def _has_word(text: str) -> bool:
    words = (word for word in re.findall(r"[^\W\d_]+", text) if not _FUNCTIONS.fullmatch(word))
    return any(
        len(word) > 3 or word.lower() == "no" or (len(word) == 3 and re.search("[aeiou]", word, re.IGNORECASE))
        for word in words
    )


def compare_numbers(answer: str, label: str) -> bool | None:
    """Return whether two numbers are equal, up to rounding at the sixth decimal; None if one of them is no number."""
    forms = [_TEXT.sub(r"\1", _NOUN.sub("", _split_unit(_bare(text))[0])) for text in (answer, label)]
    left_sides = [_LEFT_SIDE.match(form) for form in forms]
    if left_sides[0] is None or left_sides[1] is None or left_sides[0][1] == left_sides[1][1]:
        forms = [form[side.end() :] if side else form for form, side in zip(forms, left_sides, strict=True)]
    number, right = map(whole_value, forms)
    if number is None or right is None:
        return None
    if number.denominator == right.denominator == 1:
        return number == right
    return abs(number - right) <= min(_TOLERANCE, _RELATIVE_TOLERANCE * max(abs(number), abs(right)))


def differ(answer: str, label: str) -> bool:
    """Return whether two expressions differ in what math-verify overlooks: units, the base of numbers, sets and intervals,
    alternatives, and relations without a left side.
    """
    units = [_split_unit(_bare(text))[1] for text in (answer, label)]
    forms = [_TEXT.sub(r"\1", _SPACING.sub(" ", _bare(text))).strip() for text in (answer, label)]
    brackets = [next((kind for start, kind in _BRACKETS.items() if form.startswith(start)), None) for form in forms]
    bases = [_BASE.search(form) for form in forms]
    relations = [next((kind for start, kind in _RELATIONS.items() if form.startswith(start)), None) for form in forms]
    alternatives = [len(_ALTERNATIVE.findall(_bare(text))) + text.count("|") % 2 for text in (answer, label)]
    return (
        (None not in brackets and brackets[0] != brackets[1])
        or (bases[0] and bases[0][1]) != (bases[1] and bases[1][1])
        or ("" not in units and units[0] != units[1])
        or relations[0] != relations[1]
        or alternatives[0] != alternatives[1]
    )


def _split_unit(text: str) -> tuple[str, str]:
    """Return an expression without its unit, and the unit, such as ``cm^2``; empty if it has none."""
    currency = _CURRENCY.match(text)
    if currency:
        return currency[1] + text[currency.end() :], "dollar^1" if currency[2] else "euro^1"
    plain = _DEGREES.sub(" degrees", _TEXT.sub(r"\1", _SPACING.sub(" ", text)).strip())
    match = _UNIT.search(plain)
    top, bottom = (_unit(match[2]), _unit(match[4] or "")) if match else ("", "")
    if match is None or not top or bool(match[4]) != bool(bottom):
        return text, ""
    power = {"square": "2", "cubic": "3"}.get((match[1] or "").lower(), match[3] or "1")
    return plain[: match.start()], f"{top}^{power}" + (f"/{bottom}^{match[5] or 1}" if bottom else "")


def _unit(word: str) -> str:
    """Return the unit that a word names, or an empty string; ``5M`` are not 5 meters."""
    return _UNITS.get(word if len(word) == 1 else word.lower(), "")
