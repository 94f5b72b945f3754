r"""Numbers as people and models write them: ``1,234.50``, ``3/4``, ``1 1/2``, ``50%``, ``\frac{3}{4}``, ``2 \times 10^{3}``."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from agentrl.rewards.extraction import last_boxed

_LONGEST = 300
"""Longest number, in characters, and largest exponent: beyond it parsing costs time, and no answer is as long."""
_RELATIVE = Fraction(1, 10**9)
"""Relative tolerance, for rounded floats in labels."""

# Runs of spaces are bounded: a text of only spaces must not take quadratic time.
_ARGUMENT = r"(?:\{([^{}]*)\}|([0-9]))"
_FRAC = rf"\\[dt]?frac\s{{0,3}}{_ARGUMENT}\s{{0,3}}{_ARGUMENT}"
_POWER_OF_TEN = r"10\s?\^\s?(?:\{\s?([-+]?[0-9]+)\s?\}|([-+]?[0-9]+))"
_Replacement = str | Callable[[re.Match[str]], str]
_PATTERNS: tuple[tuple[str, _Replacement], ...] = (
    (r"[−–]", "-"),
    (r"(?<=[0-9])(?:\{,\}|\\[,!;: ]|[\u00a0\u202f\u2009_'’])(?=[0-9]{3})", ""),  # separators of thousands
    (r"\A\s{0,3}([0-9]{1,3}(?: [0-9]{3})+)\s{0,3}\Z", lambda match: match[1].replace(" ", "")),
    (r"\\left|\\right|\\?\$", ""),
    (r"\\[,!;:]", " "),
    (r"\\%", "%"),
    # A sign may stand apart where no number is before it, and no list begins: "x = - 5", but neither "10 - 5" nor "- 5 apples".
    (r"(?<=[=<>≈≤≥({\[,:])(\s{0,3}[-+])\s{1,3}(?=[0-9.])", r"\1"),
    (r"\A\s{0,3}([-+])\s{1,3}(?=[0-9.][0-9.,/%]{0,300}\s{0,3}\Z)", r"\1"),
    (rf"(?<=[0-9])\s{{0,3}}{_FRAC}", r" \1\2/\3\4"),  # 1\frac{1}{2} is 1 1/2
    (_FRAC, r"\1\2/\3\4"),
    (rf"\s{{0,3}}(?:\\times|\\cdot|×|\*)\s{{0,3}}{_POWER_OF_TEN}", r"e\1\2"),
    (rf"(?<![\w.]){_POWER_OF_TEN}", r"1e\1\2"),
)
_REWRITES = tuple((re.compile(pattern), replacement) for pattern, replacement in _PATTERNS)
_DECIMAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(
    # Not part of a word, an index or an exponent. A sign is one only before a number, not between two: 10-5 has none.
    rf"(?<![\w.^])(?<![_^]\{{)(?P<sign>(?<![\w)\]}}%])[-+])?"
    rf"(?:(?P<whole>[0-9]+)\s{{1,3}}(?P<part>[0-9]+)/(?P<parts>[0-9]+)"
    rf"|(?P<top>{_DECIMAL})(?:\s?/\s?(?P<bottom>{_DECIMAL})|[eE](?P<exponent>[-+]?[0-9]+))?)"
    rf"(?P<percent>\s?%)?"
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


def same_number(answer: Fraction, right: Fraction) -> bool:
    """Return whether two numbers are equal: whole numbers exactly, others up to the rounding of floats (1e-9)."""
    if answer.denominator == 1 and right.denominator == 1:
        return answer == right
    return abs(answer - right) <= _RELATIVE * max(abs(answer), abs(right))


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
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > _LONGEST or abs(int(match["exponent"] or 0)) > _LONGEST:
        return None
    try:
        if match["whole"] is not None:
            value = int(match["whole"]) + Fraction(int(match["part"]), int(match["parts"]))
        else:
            value = _decimal(match["top"]) / _decimal(match["bottom"] or "1")
            value *= Fraction(10) ** int(match["exponent"] or 0)
    except ZeroDivisionError:
        return None
    value = value / 100 if match["percent"] else value
    return -value if (match["sign"] or "").startswith("-") else value


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))
