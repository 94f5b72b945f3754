"""Families of generated problems, each with a program that solves it and similar wrong programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from random import Random


@dataclass(frozen=True, slots=True)
class Problem:
    """One generated problem. Example: ``Problem("What is 12 times 34?", "print(12 * 34)", "408", ("print(12 + 34)",))``."""

    text: str
    """Text of the question."""
    code: str
    """A Python program that prints the answer."""
    answer: str
    """The answer, computed without that program."""
    wrong: tuple[str, ...]
    """Programs with a wrong method: they run, and mostly print something else."""
    level: int = 1
    """Number of operations, from 1 to 4."""


def _pick(rng: Random, *items: str) -> str:
    return items[rng.randrange(len(items))]


def product(rng: Random) -> Problem:
    """Return a product of two large numbers."""
    a, b = rng.randrange(100, 100_000), rng.randrange(100, 100_000)
    text = _pick(rng, f"What is {a} times {b}?", f"Multiply {a} by {b}.", f"Find the product of {a} and {b}.")
    return Problem(text, f"print({a} * {b})", str(a * b), (f"print({a} + {b})", f"print({a} - {b})"))


def chain(rng: Random) -> Problem:
    """Return one to four operations, one after the other."""
    value = first = rng.randrange(10, 1000)
    level = rng.randrange(1, 5)
    words, lines, wrong = [], [f"x = {first}"], [f"x = {first}"]
    slip = rng.randrange(level)
    for index in range(level):
        n = rng.randrange(2, 100)
        sign, wrong_sign, word, value = (
            ("+", "-", f"add {n}", value + n),
            ("-", "+", f"subtract {n}", value - n),
            ("*", "+", f"multiply by {n}", value * n),
        )[rng.randrange(3)]
        words.append(word)
        lines.append(f"x {sign}= {n}")
        wrong.append(f"x {wrong_sign if index == slip else sign}= {n}")
    text = f"Start with {first}, {', '.join(words)}. What is the result?"
    return Problem(text, _program(lines), str(value), (_program(wrong),), level)


def _program(lines: list[str]) -> str:
    return "\n".join([*lines, "print(x)"])


def remainder(rng: Random) -> Problem:
    """Return the remainder of a power or of a product."""
    modulus = rng.randrange(11, 1000)
    if rng.random() < 0.5:
        a, b = rng.randrange(100, 10_000), rng.randrange(100, 10_000)
        text, code, answer = f"{a} times {b}", f"print({a} * {b} % {modulus})", a * b % modulus
        wrong: tuple[str, ...] = (f"print({a} * {b})", f"print({a} + {b} % {modulus})")
    else:
        a, b = rng.randrange(2, 100), rng.randrange(10, 1000)
        text, code, answer = f"{a} to the power {b}", f"print(pow({a}, {b}, {modulus}))", pow(a, b, modulus)
        wrong = (f"print({a} * {b} % {modulus})",)
    return Problem(f"What is the remainder of {text} divided by {modulus}?", code, str(answer), wrong, 2)


def divisor(rng: Random) -> Problem:
    """Return a greatest common divisor or a least common multiple of two numbers."""
    shared = rng.randrange(2, 60)
    a, b = shared * rng.randrange(2, 80), shared * rng.randrange(2, 80)
    name, wrong_name = _pick(rng, "gcd lcm", "lcm gcd").split()
    description = {"gcd": "greatest common divisor", "lcm": "least common multiple"}[name]
    answer = math.gcd(a, b) if name == "gcd" else a * b // math.gcd(a, b)
    code, wrong = (f"import math\nprint(math.{function}({a}, {b}))" for function in (name, wrong_name))
    return Problem(f"What is the {description} of {a} and {b}?", code, str(answer), (wrong,))


def series(rng: Random) -> Problem:
    """Return the sum of the integers of a range, of their squares, or of the multiples among them."""
    low, high, step = rng.randrange(1, 100), rng.randrange(101, 2000), rng.randrange(2, 20)
    numbers = range(low, high + 1)
    kind = rng.randrange(3)
    text, term, count = (
        ("integers", "k", lambda k: k),
        ("squares of the integers", "k * k", lambda k: k * k),
        (f"multiples of {step}", f"k * (k % {step} == 0)", lambda k: k * (k % step == 0)),
    )[kind]
    answer = sum(map(count, numbers))
    code, wrong = (f"print(sum({term} for k in range({low}, {end})))" for end in (f"{high} + 1", f"{high}"))
    return Problem(f"What is the sum of the {text} from {low} to {high}?", code, str(answer), (wrong,), 1 + (kind > 0))


def counting(rng: Random) -> Problem:
    """Return how many integers of a range have a property."""
    low, high = rng.randrange(1, 200), rng.randrange(300, 5000)
    a, b = rng.randrange(2, 13), rng.randrange(2, 13)
    numbers = range(low, high + 1)
    text, test, wrong_test, has_property, level = (
        (f"are divisible by {a}", f"k % {a} == 0", f"k % {a} != 0", lambda k: k % a == 0, 2),
        (
            f"are divisible by {a} but not by {b}",
            f"k % {a} == 0 and k % {b} != 0",
            f"k % {a} == 0 and k % {b} == 0",
            lambda k: k % a == 0 and k % b != 0,
            3,
        ),
        (
            f"have a sum of digits that is divisible by {a}",
            f"sum(map(int, str(k))) % {a} == 0",
            f"k % {a} == 0",
            lambda k: _digit_sum(k) % a == 0,
            4,
        ),
    )[rng.randrange(3)]
    answer = sum(map(has_property, numbers))
    code, wrong = (f"print(sum({condition} for k in range({low}, {high} + 1)))" for condition in (test, wrong_test))
    return Problem(f"How many integers from {low} to {high} {text}?", code, str(answer), (wrong,), level)


def _digit_sum(number: int) -> int:
    total = 0
    while number:
        number, digit = divmod(number, 10)
        total += digit
    return total


def digits(rng: Random) -> Problem:
    """Return the sum of the digits of a power, or how many digits it has."""
    base, exponent = rng.randrange(2, 100), rng.randrange(10, 200)
    power = f"{base} ** {exponent}"
    text, code, wrong, answer = (
        (
            f"What is the sum of the digits of {base} to the power {exponent}?",
            f"print(sum(map(int, str({power}))))",
            f"print(sum(map(int, str({base}))))",
            _digit_sum(base**exponent),
        ),
        (
            f"How many digits does {base} to the power {exponent} have?",
            f"print(len(str({power})))",
            f"print(len(str({base} * {exponent})))",
            len(str(base**exponent)),
        ),
    )[rng.randrange(2)]
    return Problem(text, code, str(answer), (wrong,), 2)


# fmt: off
_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
           "December")
# fmt: on
_WEEKDAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


def dates(rng: Random) -> Problem:
    """Return the days between two dates, or the day of the week some days after one."""
    first = date(1900, 1, 1) + timedelta(days=rng.randrange(60_000))
    days = rng.randrange(30, 9000)
    last = first + timedelta(days=days)
    if rng.random() < 0.5:
        text = f"How many days after {_day(first)} is {_day(last)}?"
        code = f"from datetime import date\nprint(({_call(last)} - {_call(first)}).days)"
        return Problem(text, code, str(days), (code.replace(".days)", ".days + 1)"),), 2)
    text = f"Which day of the week is {days} days after {_day(first)}?"
    code = f'from datetime import date, timedelta\nprint(({_call(first)} + timedelta({days})).strftime("%A"))'
    return Problem(text, code, _WEEKDAYS[last.weekday()], (code.replace(f"timedelta({days})", "timedelta(0)"),), 2)


def _day(day: date) -> str:
    return f"{day.day} {_MONTHS[day.month - 1]} {day.year}"


def _call(day: date) -> str:
    return f"date({day.year}, {day.month}, {day.day})"


def shop(rng: Random) -> Problem:
    """Return a story of four operations."""
    boxes, size, price = rng.randrange(12, 400), rng.randrange(6, 145), rng.randrange(2, 60)
    broken = rng.randrange(3, 60)
    rent = rng.randrange(10, 2000)
    thing = _pick(rng, "cups", "lamps", "pens", "bowls", "clocks")
    name = _pick(rng, "Ada", "Emil", "Ines", "Omar", "Ruth")
    text = (
        f"{name} buys {boxes} boxes of {size} {thing} each. {broken} of the {thing} are broken, and the rest are sold for "
        f"{price} coins apiece. {name} then pays {rent} coins of rent. How many coins are left of what was earned?"
    )
    code = f"print(({boxes} * {size} - {broken}) * {price} - {rent})"
    wrong = (f"print({boxes} * {size} * {price} - {rent})", f"print(({boxes} * {size} - {broken}) * {price})")
    return Problem(text, code, str((boxes * size - broken) * price - rent), wrong, 4)


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of problem."""

    draw: Callable[[Random], Problem]
    """Draws a problem."""
    levels: tuple[int, ...]
    """Levels of its problems."""


FAMILIES: Mapping[str, Family] = {
    "product": Family(product, (1,)),
    "divisor": Family(divisor, (1,)),
    "chain": Family(chain, (1, 2, 3, 4)),
    "series": Family(series, (1, 2)),
    "remainder": Family(remainder, (2,)),
    "digits": Family(digits, (2,)),
    "dates": Family(dates, (2,)),
    "counting": Family(counting, (2, 3, 4)),
    "shop": Family(shop, (4,)),
}
"""By the names of ``tasks.options.families``."""
