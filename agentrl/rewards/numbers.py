r"""Numbers as people and models write them: ``1,234.50``, ``3/4``, ``1 1/2``, ``50%``, ``\frac{3}{4}``, ``2 \times 10^{3}``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from agentrl.rewards.answers import last_boxed

_LONGEST = 300
"""Longest number, in characters, and largest exponent: beyond it parsing costs time, and no answer is as long."""
_RELATIVE = Fraction(1, 10**9)
"""Relative tolerance, for rounded floats in labels."""

# Runs of spaces are bounded: a text of only spaces must not take quadratic time.
_ARGUMENT = r"(?:\{([^{}]*)\}|(\d))"
_FRAC = rf"\\[dt]?frac\s{{0,3}}{_ARGUMENT}\s{{0,3}}{_ARGUMENT}"
_POWER_OF_TEN = r"10\s?\^\s?(?:\{\s?([-+]?\d+)\s?\}|([-+]?\d+))"
_REWRITES = tuple(
    (re.compile(pattern), by)
    for pattern, by in (
        (r"[−–]", "-"),
        (r"(?<=\d)(?:\{,\}|\\[,!;: ]|[\u00a0\u202f\u2009])(?=\d)", ""),  # spaces within a number
        (r"\\left|\\right|\\[,!;:]|\\?\$", ""),
        (r"\\%", "%"),
        (rf"(?<=\d)\s{{0,3}}{_FRAC}", r" \1\2/\3\4"),  # 1\frac{1}{2} is 1 1/2
        (_FRAC, r"\1\2/\3\4"),
        (rf"\s{{0,3}}(?:\\times|\\cdot|×|\*)\s{{0,3}}{_POWER_OF_TEN}", r"e\1\2"),
        (rf"(?<![\w.]){_POWER_OF_TEN}", r"1e\1\2"),
    )
)
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    # Not part of a word, an index or an exponent. A sign is one only before a number, not between two: 10-5 has none.
    rf"(?<![\w.^])(?<![_^]\{{)(?P<sign>(?<![\w)\]}}%])[-+])?"
    rf"(?:(?P<whole>\d+)\s{{1,3}}(?P<part>\d+)/(?P<parts>\d+)"
    rf"|(?P<top>{_DECIMAL})(?:\s?/\s?(?P<bottom>{_DECIMAL})|[eE](?P<exponent>[-+]?\d+))?)"
    rf"(?P<percent>\s?%)?"
)


@dataclass(frozen=True, slots=True)
class Number:
    """A number, exactly as it was written."""

    value: Fraction
    """Value; 50 for ``50%``."""
    percent: bool
    """Whether a percent sign followed."""


def last_number(text: str) -> Number | None:
    r"""Return the last number in ``text`` (in its last ``\boxed{…}``, if that contains one), or None.

    None too if the last number is undefined, such as ``1/0``.
    """
    boxed = last_boxed(text)
    for source in (boxed, text):
        matches = [] if source is None else list(_NUMBER.finditer(_plain(source)))
        if matches:
            return _number(matches[-1])
    return None


def same_number(answer: Number, right: Number) -> bool:
    """Return whether two numbers are equal: whole numbers exactly, others up to the rounding of floats (1e-9).

    If only one of them has a percent sign, the other matches with (``50%`` is ``50``) and without it (``50%`` is ``0.5``).
    """
    if answer.percent == right.percent:
        return _close(answer.value, right.value)
    share, plain = (answer, right) if answer.percent else (right, answer)
    return _close(share.value, plain.value) or _close(share.value / 100, plain.value)


def _plain(text: str) -> str:
    for pattern, by in _REWRITES:
        text = pattern.sub(by, text)
    return text


def _number(match: re.Match[str]) -> Number | None:
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
    negative = (match["sign"] or "").startswith("-")
    return Number(-value if negative else value, match["percent"] is not None)


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def _close(first: Fraction, second: Fraction) -> bool:
    if first.denominator == 1 and second.denominator == 1:
        return first == second
    return abs(first - second) <= _RELATIVE * max(abs(first), abs(second))
