r"""Numbers as people and models write them: ``1,234.5``, ``1 1/2``, ``50%``, ``\frac{3}{4}``, ``2 thousand``."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from agentrl.rewards.characters import SUPERSCRIPT_DIGITS, SUPERSCRIPTS, VULGAR, plain_characters, vulgar_fraction
from agentrl.rewards.extraction import last_boxed

_LONGEST = 300
"""Longest number, in characters, and largest exponent: beyond it parsing costs time, and no answer is as long."""
_RELATIVE, _ABSOLUTE, _FLOAT = Fraction(1, 10**9), Fraction(1, 10**6), Fraction(1, 10**12)
"""Tolerances for rounded numbers in labels: relative, but for large numbers absolute, and the relative one of floats."""

# Runs of spaces are bounded: a text of only spaces must not take quadratic time.
_ARGUMENT = r"(?:\{([^{}]*)\}|([0-9]))"
_FRAC = rf"\\[cdt]?frac\s{{0,3}}{_ARGUMENT}\s{{0,3}}{_ARGUMENT}"
_POWER_OF_TEN = r"10\s?(?:\^|\*\*)\s?(?:\{\s?([-+]?[0-9]+)\s?\}|([-+]?[0-9]+))"
THOUSANDS = r"(?<=[0-9])(?:\{,\}|\\[,!;: ]|,\\!|[\u00a0\u202f\u2009_'])(?=[0-9]{3})"
"""Separators of thousands, other than commas and spaces."""
_Replacement = str | Callable[[re.Match[str]], str]
_PATTERNS: tuple[tuple[str, _Replacement], ...] = (
    (rf"[{SUPERSCRIPTS}]{{1,9}}", lambda match: f"^{match[0].translate(SUPERSCRIPT_DIGITS)}"),
    (VULGAR, lambda match: vulgar_fraction(match[0])),
    (r"\\(?:text|mathrm)\s?\{([^{}]{0,99})\}", r" \1"),
    (r"(?<![0-9)] )\b(?:[Mm]inus|[Nn]egative)\s{1,3}(?=[0-9.])", "-"),
    (THOUSANDS, ""),
    (r"\A\s{0,3}([-+]?[0-9]{1,3}(?: [0-9]{3})+)(?=(?:\.[0-9]+)?\s{0,3}\Z)", lambda match: match[1].replace(" ", "")),
    (  # 1.234.567 and 1.234,56
        r"(?<![\w.,])([1-9][0-9]{0,2}(?:(?:\.[0-9]{3}){2,}(?:,[0-9]{1,2})?|(?:\.[0-9]{3}),[0-9]{1,2}))(?![0-9]|[.,][0-9])",
        lambda match: match[1].replace(".", "").replace(",", "."),
    ),
    (r"\\left|\\right|\\?\$", ""),
    (r"\\[,!;:]", " "),
    (r"\\%", "%"),
    # A sign may stand apart where no number is before it, and no list begins: "x = - 5", but neither "10 - 5" nor "- 5 apples".
    (r"(?<=[=<>≈≤≥({\[,:])(\s{0,3}[-+])\s{1,3}(?=[0-9.])", r"\1"),
    (r"\A\s{0,3}([-+])\s{1,3}(?=[0-9.][0-9.,/%]{0,300}\s{0,3}\Z)", r"\1"),
    (rf"(?<=[0-9])\s{{0,3}}{_FRAC}", r" \1\2/\3\4"),  # 1\frac{1}{2} is 1 1/2
    (_FRAC, r"\1\2/\3\4"),
    ("\N{FRACTION SLASH}", "/"),
    (rf"(?<=[0-9])\s{{0,3}}(?:\\times|\\cdot|[×·x*])\s{{0,3}}{_POWER_OF_TEN}", r"e\1\2"),
    (rf"(?<![\w.]){_POWER_OF_TEN}", r"1e\1\2"),
    (r"\^\s?\{\s?([-+]?[0-9]+)\s?\}", r"^\1"),
)
_REWRITES = tuple((re.compile(pattern), replacement) for pattern, replacement in _PATTERNS)
_DECIMAL = (  # with separators as in 1,234,567, or as in India, 12,34,567
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3}(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
)
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
"""Words after a number that are powers of ten."""
_NUMBER = re.compile(
    # Not part of a word, an index or an exponent. A sign is one only before a number, not between two: 10-5 has none.
    rf"(?<![\w.^])(?<![_^]\{{)(?P<sign>(?<![\w)\]}}%])[-+])?"
    rf"(?:(?P<whole>[0-9]+)\s{{1,3}}(?P<part>[0-9]+)/(?P<parts>[0-9]+)"
    rf"|(?P<top>{_DECIMAL})(?:\s?/\s?(?P<bottom>{_DECIMAL})|[eE](?P<exponent>[-+]?[0-9]+)|\^(?P<power>[-+]?[0-9]+))?)"
    rf"(?:(?P<percent>\s?%|\s{{1,3}}per\s?cent\b)|\s{{0,3}}(?P<scale>(?i:{'|'.join(SCALES)}))\b)?"
)
_WHOLE_TEXT = re.compile(r"([-+])?\s{0,3}((?:0|[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]*)?)(?:\.([0-9]*))?\s{0,3}(%?)")


def last_number(text: str) -> Fraction | None:
    r"""Return the last number in ``text`` (in its last ``\boxed{…}``, if that contains one), or None.

    ``4%`` is 0.04. None too if the last number is undefined, such as ``1/0``.
    """
    boxed = last_boxed(text)
    for source in (boxed, text):
        matches = [] if source is None else list(_NUMBER.finditer(_plain(source)))
        if matches:
            return _value(matches[-1])
    return None


def whole_value(text: str) -> Fraction | None:
    """Return the value of a text that is one number and nothing else, in any notation; None for other texts."""
    match = _NUMBER.fullmatch(_plain(text).strip())
    return None if match is None else _value(match)


def same_number(answer: Fraction, right: Fraction) -> bool:
    """Return whether two numbers are equal: whole numbers exactly, others up to rounding (1e-9, at most 1e-6)."""
    if answer.denominator == 1 and right.denominator == 1:
        return answer == right
    size = max(abs(answer), abs(right))
    return abs(answer - right) <= max(_FLOAT * size, min(_RELATIVE * size, _ABSOLUTE))


def whole_number(text: str) -> str | None:
    """Return the one spelling of a text that is a decimal number and nothing else; None for other texts.

    Example: ``whole_number("+1,234.50") == "1234.5"``. Codes such as ``007`` are other texts.
    """
    match = _WHOLE_TEXT.fullmatch(text)
    if match is None or not (match[2] or match[3]):
        return None
    digits, decimals = (match[2] or "0").replace(",", ""), (match[3] or "").rstrip("0")
    number = f"{digits}.{decimals}" if decimals else digits
    return ("-" if match[1] == "-" and number != "0" else "") + number + match[4]


def _plain(text: str) -> str:
    text = plain_characters(text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def _value(match: re.Match[str]) -> Fraction | None:
    power = int(match["power"] or 1) if len(match[0]) <= _LONGEST else 0
    if len(match[0]) > _LONGEST or abs(int(match["exponent"] or 0)) > _LONGEST or len(match[0]) * abs(power) > _LONGEST:
        return None
    try:
        if match["whole"] is not None:
            value = int(match["whole"]) + Fraction(int(match["part"]), int(match["parts"]))
        else:
            value = _decimal(match["top"]) ** power / _decimal(match["bottom"] or "1")
            value *= Fraction(10) ** int(match["exponent"] or 0)
    except ZeroDivisionError:
        return None
    value = value / 100 if match["percent"] else value * SCALES.get((match["scale"] or "").lower(), 1)
    return -value if (match["sign"] or "").startswith("-") else value


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))
