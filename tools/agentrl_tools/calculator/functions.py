"""The functions and constants that an expression may name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction

from .numbers import MAX_BITS, MAX_DIGITS, CalculatorError, Number, apply_real, exact_root, power, to_integer

Function = Callable[..., Number]

_LARGE = Fraction(10) ** 300
_SMALL = 1 / _LARGE
_MODULAR_BITS = 1024
"""Bits of the numbers of a modular power, whose time grows with their third power."""

CONSTANTS: Mapping[str, Number] = {"pi": math.pi, "e": math.e, "tau": math.tau}


def _real(function: Callable[..., float]) -> Function:
    return lambda number: apply_real(function, number)


def _sqrt(number: Number) -> Number:
    if number < 0:
        raise CalculatorError("sqrt of a negative number is not a real number")
    root = exact_root(number, 2) if isinstance(number, Fraction) else None
    return math.sqrt(number) if root is None else root


def _cbrt(number: Number) -> Number:
    size: Number = -number if number < 0 else number
    root = exact_root(size, 3) if isinstance(size, Fraction) else None
    if root is None:
        return math.copysign(math.cbrt(size), number)
    return -root if number < 0 else root


def _log(number: Number, base: Number | None = None) -> Number:
    if base is None:
        return _ln(number)
    if base <= 0 or base == 1:
        raise CalculatorError("a logarithm's base must be positive and not 1")
    exact = _exact_log(number, base)
    return _ln(number) / _ln(base) if exact is None else exact


def _ln(number: Number) -> float:
    if number <= 0:
        raise CalculatorError("the logarithm of a number that is not positive is not a real number")
    if isinstance(number, Fraction) and not _SMALL < number < _LARGE:  # too large or too small for a float
        return math.log(number.numerator) - math.log(number.denominator)
    return math.log(number)


def _exact_log(number: Number, base: Number) -> Fraction | None:
    if isinstance(number, float) or isinstance(base, float) or number <= 0:
        return None
    guess = round(_ln(number) / _ln(base))
    return Fraction(guess) if abs(guess) <= MAX_BITS and power(base, Fraction(guess)) == number else None


def _round(number: Number, places: Number = Fraction(0)) -> Number:
    """Round halves to even, as Python does."""
    digits = to_integer(places, "round")
    if abs(digits) > MAX_DIGITS:
        raise CalculatorError(f"round to more than {MAX_DIGITS} digits")
    if isinstance(number, float):
        return round(number, digits)
    return Fraction(round(number, digits))


def _factorial(number: Number) -> Number:
    n = to_integer(number, "factorial")
    if n < 0:
        raise CalculatorError("factorial of a negative number is not defined")
    if n > MAX_DIGITS:
        raise CalculatorError(f"a number with more than {MAX_DIGITS} digits")
    return Fraction(math.factorial(n))


def _comb(total: Number, chosen: Number) -> Number:
    n, k = _counts(total, chosen, "comb")
    k = min(k, n - k)
    # (n/k)^k <= comb(n, k): what is too long is refused before it is computed.
    if k > MAX_BITS or k * (n.bit_length() - k.bit_length() - 1) > MAX_BITS:
        raise CalculatorError(f"a number with more than {MAX_DIGITS} digits")
    return Fraction(math.comb(n, k) if k >= 0 else 0)


def _perm(total: Number, chosen: Number | None = None) -> Number:
    if chosen is None:
        return _factorial(total)
    n, k = _counts(total, chosen, "perm")
    if k <= n and (k > MAX_DIGITS or k * (n - k).bit_length() > 2 * MAX_BITS):
        raise CalculatorError(f"a number with more than {MAX_DIGITS} digits")
    return Fraction(math.perm(n, k))


def _counts(total: Number, chosen: Number, name: str) -> tuple[int, int]:
    n, k = to_integer(total, name), to_integer(chosen, name)
    if n < 0 or k < 0:
        raise CalculatorError(f"{name} of a negative number is not defined")
    return n, k


def _gcd(*numbers: Number) -> Number:
    return Fraction(math.gcd(*(to_integer(number, "gcd") for number in numbers)))


def _lcm(*numbers: Number) -> Number:
    result = 1
    for number in numbers:
        result = math.lcm(result, to_integer(number, "lcm"))
        if result.bit_length() > MAX_BITS:
            raise CalculatorError(f"a number with more than {MAX_DIGITS} digits")
    return Fraction(result)


def _mean(first: Number, *numbers: Number) -> Number:
    return sum(numbers, first) / (1 + len(numbers))


def _modular_power(base: Number, exponent: Number, modulus: Number | None = None) -> Number:
    if modulus is None:
        return power(base, exponent)
    b, n, m = (to_integer(number, "pow with three numbers") for number in (base, exponent, modulus))
    if max(b.bit_length(), n.bit_length(), m.bit_length()) > _MODULAR_BITS:
        raise CalculatorError(f"pow with three numbers takes {_MODULAR_BITS} bits each")
    try:
        return Fraction(pow(b, n, m))
    except ValueError as error:
        raise CalculatorError(f"pow: {error}") from None


FUNCTIONS: Mapping[str, Function] = {
    "abs": abs,
    "acos": _real(math.acos),
    "asin": _real(math.asin),
    "atan": _real(math.atan),
    "atan2": lambda y, x: apply_real(math.atan2, y, x),
    "cbrt": _cbrt,
    "ceil": lambda number: Fraction(math.ceil(number)),
    "comb": _comb,
    "cos": _real(math.cos),
    "cosh": _real(math.cosh),
    "degrees": _real(math.degrees),
    "exp": _real(math.exp),
    "factorial": _factorial,
    "floor": lambda number: Fraction(math.floor(number)),
    "gcd": _gcd,
    "lcm": _lcm,
    "ln": _ln,
    "log": _log,
    "log10": lambda number: _log(number, Fraction(10)),
    "log2": lambda number: _log(number, Fraction(2)),
    "max": lambda first, *numbers: max(first, *numbers) if numbers else first,
    "mean": _mean,
    "min": lambda first, *numbers: min(first, *numbers) if numbers else first,
    "mod": lambda number, by: number % by,
    "perm": _perm,
    "pow": _modular_power,
    "radians": _real(math.radians),
    "round": _round,
    "sin": _real(math.sin),
    "sinh": _real(math.sinh),
    "sqrt": _sqrt,
    "sum": lambda *numbers: sum(numbers, Fraction(0)),
    "tan": _real(math.tan),
    "tanh": _real(math.tanh),
}
