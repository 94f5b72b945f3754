"""Problems over one line of integers: filter them, transform them, and print something about the rest.

Thousands of combinations of a few components, each with a solution of one or two lines, which a small policy can learn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from .problem import Problem

Numbers = list[int]


@dataclass(frozen=True, slots=True)
class Filter:
    """Which integers are kept."""

    words: str
    """As in "those that are even"."""
    code: str
    """A condition on ``x``; empty if all are kept."""
    wrong: str
    """A similar condition, for wrong programs."""
    test: Callable[[int], bool]
    """The condition."""


@dataclass(frozen=True, slots=True)
class Transform:
    """What each integer is replaced by."""

    words: str
    code: str
    wrong: str
    of: Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Output:
    """What is printed of the remaining integers."""

    words: str
    """As in "the sum of"."""
    code: str
    """An expression with ``{}`` for the list."""
    wrong: str
    """A similar expression, for wrong programs."""
    of: Callable[[Numbers], Sequence[int]]
    """The numbers printed."""
    many: bool = False
    """Whether a list is printed, which needs ``*``."""


def filters(k: int) -> list[Filter]:
    """Return all filters, with ``k`` as the number to compare with."""
    return [
        Filter("", "", "", lambda x: True),
        Filter("that are even", "x % 2 == 0", "x % 2 == 1", lambda x: x % 2 == 0),
        Filter("that are odd", "x % 2 == 1", "x % 2 == 0", lambda x: x % 2 == 1),
        Filter(f"that are greater than {k}", f"x > {k}", f"x < {k}", lambda x: x > k),
        Filter(f"that are less than {k}", f"x < {k}", f"x > {k}", lambda x: x < k),
        Filter(f"that are at least {k}", f"x >= {k}", f"x > {k}", lambda x: x >= k),
        Filter(f"that are at most {k}", f"x <= {k}", f"x < {k}", lambda x: x <= k),
        Filter(f"that are not {k}", f"x != {k}", f"x == {k}", lambda x: x != k),
    ]


def transforms(k: int) -> list[Transform]:
    """Return all transformations, with ``k`` as the operand."""
    return [
        Transform("", "x", "x", lambda x: x),
        Transform("the squares of", "x * x", "x * 2", lambda x: x * x),
        Transform(f"{k} times", f"x * {k}", f"x + {k}", lambda x: x * k),
        Transform(f"{k} more than", f"x + {k}", f"x - {k}", lambda x: x + k),
        Transform(f"{k} less than", f"x - {k}", f"x + {k}", lambda x: x - k),
    ]


OUTPUTS = (
    Output("the sum of", "sum({})", "len({})", lambda a: [sum(a)]),
    Output("the largest of", "max({})", "min({})", lambda a: [max(a)]),
    Output("the smallest of", "min({})", "max({})", lambda a: [min(a)]),
    Output("the number of different values among", "len(set({}))", "len({})", lambda a: [len(set(a))]),
    Output("the first of", "{}[0]", "{}[1]", lambda a: [a[0]]),
    Output("the last of", "{}[-1]", "{}[0]", lambda a: [a[-1]]),
    Output("in their order", "*{}", "{}", lambda a: a, many=True),
    Output("in reverse order", "*{}[::-1]", "*{}", lambda a: a[::-1], many=True),
    Output("from smallest to largest", "*sorted({})", "*{}", sorted, many=True),
    Output("from largest to smallest", "*sorted({})[::-1]", "*sorted({})", lambda a: sorted(a)[::-1], many=True),
)
READ = "a = list(map(int, input().split()))\n"
LENGTHS = (4, 8)
LARGEST = 20


def draw_lists(rng: Random) -> Problem:
    """Draw a problem: a filter, a transformation and an output."""
    filter_ = rng.choice(filters(rng.randint(2, 9)))
    transform = rng.choice(transforms(rng.randint(2, 9)))
    return list_problem(filter_, transform, rng.choice(OUTPUTS))


def list_problem(filter_: Filter, transform: Transform, output: Output) -> Problem:
    """Return the problem of three components."""

    def solve(text: str) -> str:
        numbers = [transform.of(x) for x in map(int, text.split()) if filter_.test(x)]
        return " ".join(map(str, output.of(numbers))) + "\n"

    def draw(rng: Random) -> str:
        while True:
            numbers = [rng.randint(1, LARGEST) for _ in range(rng.randint(*LENGTHS))]
            matching = sum(map(filter_.test, numbers))
            # If all are kept, a program without the condition passes too.
            if matching >= 2 and (matching < len(numbers) or not filter_.code):
                return " ".join(map(str, numbers)) + "\n"

    right = _program(filter_.code, transform.code, output.code)
    slips = {
        "condition": _program(filter_.wrong, transform.code, output.code),
        "forgotten": _program("", transform.code, output.code),
        "change": _program(filter_.code, transform.wrong, output.code),
        "answer": _program(filter_.code, transform.code, output.wrong),
        "text": right.replace("map(int, input().split())", "input().split()"),
        "bracket": right.rstrip("\n")[:-1] + "\n",
    }
    return Problem(
        family="lists",
        key=right,
        statement=_statement(filter_.words, transform.words, output),
        program=right,
        solve=solve,
        draw=draw,
        slips={name: program for name, program in slips.items() if program != right},
    )


def _program(condition: str, transform: str, output: str) -> str:
    where = f" if {condition}" if condition else ""
    chosen = f"[{transform} for x in a{where}]" if where or transform != "x" else "a"
    return f"{READ}print({output.format(chosen)})\n"


def _statement(filter_: str, transform: str, output: Output) -> str:
    selection = f"those {filter_}" if filter_ else "all of them"
    subject = f"{transform} {selection}".strip()
    task = f"{subject} {output.words}" if output.many else f"{output.words} {subject}"
    return f"The input is one line of integers. Print {task}."
