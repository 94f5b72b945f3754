"""Numbers of bounded size: exact fractions, and floats for results that are not rational."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, InvalidOperation, localcontext
from fractions import Fraction

Number = Fraction | float
"""A fraction is exact; a float approximates a real number."""

MAX_DIGITS = 1000
"""Digits of a number, before and after its point, of numerator and denominator."""
MAX_BITS = int(MAX_DIGITS * math.log2(10))
SHOWN_DIGITS = 15
"""Digits of a number that is not written out."""
MAX_DECIMALS = 30
"""Digits after the point that are written out; a fraction with more is shown as one."""


class CalculatorError(Exception):
    """An invalid expression, with a message for the policy."""


def check_size(number: Number) -> Number:
    """Return a number that is neither too long nor outside the real numbers.

    Raises:
        CalculatorError: it is.
    """
    if isinstance(number, float):
        if math.isnan(number):
            raise CalculatorError("the result is not a number")
        if math.isinf(number):
            raise CalculatorError("the result is too large")
        return number
    if max(number.numerator.bit_length(), number.denominator.bit_length()) > MAX_BITS:
        raise CalculatorError(f"a number with more than {MAX_DIGITS} digits")
    return number


def literal(text: str) -> Fraction:
    """Return the exact value of a decimal literal: ``0.1`` is a tenth.

    Raises:
        CalculatorError: it has too many digits.
    """
    try:
        decimal = Decimal(text.replace("_", ""))
    except InvalidOperation:
        raise CalculatorError(f"a number with more than {MAX_DIGITS} digits") from None
    _, digits, exponent = decimal.as_tuple()
    assert isinstance(exponent, int)  # a literal is no NaN
    if len(digits) > MAX_DIGITS or abs(exponent) > MAX_DIGITS:
        raise CalculatorError(f"a number with more than {MAX_DIGITS} digits")
    return Fraction(decimal)


def to_integer(number: Number, name: str) -> int:
    """Return a number as an integer.

    Raises:
        CalculatorError: it is not an integer; the message names ``name``.
    """
    if isinstance(number, float) or number.denominator != 1:
        raise CalculatorError(f"{name} needs whole numbers, not {format_number(number)}")
    return number.numerator


def power(base: Number, exponent: Number) -> Number:
    """Return ``base ** exponent``: exact if it is rational and an exact root is found, otherwise a float."""
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        return _integer_power(base, exponent.numerator)
    if base < 0:
        raise CalculatorError("a negative number to a fractional power is not a real number")
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        root = exact_root(base, exponent.denominator)
        if root is not None:
            return _integer_power(root, exponent.numerator)
    return _near_power(base, exponent)


def _near_power(base: Number, exponent: Number) -> float:
    try:
        return math.pow(base, exponent)
    except ValueError:  # of nothing, or what is too small for a float, to a negative power
        raise ZeroDivisionError from None


def _integer_power(base: Number, exponent: int) -> Number:
    if isinstance(base, float):
        return _near_power(base, exponent)
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size > 1 and (size - 1) * abs(exponent) > MAX_BITS:
        raise CalculatorError(f"a number with more than {MAX_DIGITS} digits")
    if size <= 1:  # of -1, 0 and 1 only the parity matters, however large the exponent
        exponent = (exponent > 0) - (exponent < 0) if exponent % 2 else 2 * ((exponent > 0) - (exponent < 0))
    return base**exponent


def exact_root(number: Fraction, degree: int) -> Fraction | None:
    """Return the root of a non-negative number if it is rational, otherwise None."""
    numerator, denominator = _integer_root(number.numerator, degree), _integer_root(number.denominator, degree)
    return None if numerator is None or denominator is None else Fraction(numerator, denominator)


def _integer_root(number: int, degree: int) -> int | None:
    if number < 2 or degree == 1:
        return number
    if degree > number.bit_length():
        return None
    root = 1 << -(-number.bit_length() // degree)
    while (nearer := ((degree - 1) * root + number // root ** (degree - 1)) // degree) < root:
        root = nearer  # Newton's method, from above
    return root if root**degree == number else None


def apply_real(function: Callable[..., float], *numbers: Number) -> float:
    """Return a function of the real numbers.

    Raises:
        CalculatorError: it is not defined there, or its value is too large.
    """
    try:
        return function(*(float(number) for number in numbers))
    except ValueError:
        raise CalculatorError(f"{function.__name__} is not defined there") from None


def format_number(number: Number) -> str:
    """Return a number as text: ``3``, ``0.25``, ``1/3 ≈ 0.333333333333333`` or ``≈ 1.4142135623731``."""
    if isinstance(number, float):
        return f"≈ {number:.{SHOWN_DIGITS}g}"
    if number.denominator == 1:
        return str(number.numerator)
    return _written_out(number) or f"{number.numerator}/{number.denominator} ≈ {_near(number)}"


def _written_out(number: Fraction) -> str:
    """Return a decimal fraction, or an empty string for an infinite or long one."""
    places = 0
    scaled = number.denominator
    while scaled % 10 == 0:
        scaled, places = scaled // 10, places + 1
    for prime in (2, 5):
        while scaled % prime == 0 and places <= MAX_DECIMALS:
            scaled, places = scaled // prime, places + 1
    if scaled != 1 or places > MAX_DECIMALS:
        return ""
    digits = str(abs(number.numerator) * 10**places // number.denominator).rjust(places + 1, "0")
    sign = "-" if number < 0 else ""
    return f"{sign}{digits[:-places]}.{digits[-places:]}".rstrip("0")


def _near(number: Fraction) -> str:
    with localcontext() as context:
        context.prec = SHOWN_DIGITS
        return str(Decimal(number.numerator) / Decimal(number.denominator))
