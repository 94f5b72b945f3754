"""Problems over one line of integers: take some of them, change them, and say something of the rest.

Thousands of combinations of a few parts, each with a solution of one or two lines: what a small policy can learn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from .problem import Problem

Numbers = list[int]


@dataclass(frozen=True, slots=True)
class Take:
    """Which integers count."""

    words: str
    """As in "those that are even"."""
    code: str
    """A condition on ``x``; empty where all count."""
    wrong: str
    """A condition that is easily mistaken for it."""
    test: Callable[[int], bool]
    """The condition."""


@dataclass(frozen=True, slots=True)
class Change:
    """What is made of each."""

    words: str
    code: str
    wrong: str
    of: Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Say:
    """What is printed."""

    words: str
    """As in "the sum of"."""
    code: str
    """An expression with ``{}`` for the list."""
    wrong: str
    """One that is easily mistaken for it."""
    of: Callable[[Numbers], Sequence[int]]
    """The numbers printed."""
    many: bool = False
    """Whether it is a list that is printed, which wants ``*``."""


def takes(k: int) -> list[Take]:
    """Return the conditions, those with a number taking ``k``."""
    return [
        Take("", "", "", lambda x: True),
        Take("that are even", "x % 2 == 0", "x % 2 == 1", lambda x: x % 2 == 0),
        Take("that are odd", "x % 2 == 1", "x % 2 == 0", lambda x: x % 2 == 1),
        Take(f"that are greater than {k}", f"x > {k}", f"x < {k}", lambda x: x > k),
        Take(f"that are less than {k}", f"x < {k}", f"x > {k}", lambda x: x < k),
        Take(f"that are at least {k}", f"x >= {k}", f"x > {k}", lambda x: x >= k),
        Take(f"that are at most {k}", f"x <= {k}", f"x < {k}", lambda x: x <= k),
        Take(f"that are not {k}", f"x != {k}", f"x == {k}", lambda x: x != k),
    ]


def changes(k: int) -> list[Change]:
    """Return what can be made of a number, some with ``k``."""
    return [
        Change("", "x", "x", lambda x: x),
        Change("the squares of", "x * x", "x * 2", lambda x: x * x),
        Change(f"{k} times", f"x * {k}", f"x + {k}", lambda x: x * k),
        Change(f"{k} more than", f"x + {k}", f"x - {k}", lambda x: x + k),
        Change(f"{k} less than", f"x - {k}", f"x + {k}", lambda x: x - k),
    ]


SAYS = (
    Say("the sum of", "sum({})", "len({})", lambda a: [sum(a)]),
    Say("the largest of", "max({})", "min({})", lambda a: [max(a)]),
    Say("the smallest of", "min({})", "max({})", lambda a: [min(a)]),
    Say("the number of different values among", "len(set({}))", "len({})", lambda a: [len(set(a))]),
    Say("the first of", "{}[0]", "{}[1]", lambda a: [a[0]]),
    Say("the last of", "{}[-1]", "{}[0]", lambda a: [a[-1]]),
    Say("in their order", "*{}", "{}", lambda a: a, many=True),
    Say("in reverse order", "*{}[::-1]", "*{}", lambda a: a[::-1], many=True),
    Say("from smallest to largest", "*sorted({})", "*{}", sorted, many=True),
    Say("from largest to smallest", "*sorted({})[::-1]", "*sorted({})", lambda a: sorted(a)[::-1], many=True),
)
READ = "a = list(map(int, input().split()))\n"
LENGTHS = (4, 8)
LARGEST = 20


def draw_lists(rng: Random) -> Problem:
    """Draw a problem."""
    take = rng.choice(takes(rng.randint(2, 9)))
    change = rng.choice(changes(rng.randint(2, 9)))
    return list_problem(take, change, rng.choice(SAYS))


def list_problem(take: Take, change: Change, say: Say) -> Problem:
    """Return the problem of three parts."""

    def solve(given: str) -> str:
        kept = [change.of(x) for x in map(int, given.split()) if take.test(x)]
        return " ".join(map(str, say.of(kept))) + "\n"

    def draw(rng: Random) -> str:
        while True:
            numbers = [rng.randint(1, LARGEST) for _ in range(rng.randint(*LENGTHS))]
            kept = sum(map(take.test, numbers))
            # Where all count, it makes no difference whether a program looks at the condition.
            if kept >= 2 and (kept < len(numbers) or not take.code):
                return " ".join(map(str, numbers)) + "\n"

    right = _program(take.code, change.code, say.code)
    slips = {
        "condition": _program(take.wrong, change.code, say.code),
        "forgotten": _program("", change.code, say.code),
        "change": _program(take.code, change.wrong, say.code),
        "answer": _program(take.code, change.code, say.wrong),
        "text": right.replace("map(int, input().split())", "input().split()"),
        "bracket": right.rstrip("\n")[:-1] + "\n",
    }
    return Problem(
        family="lists",
        key=right,
        statement=_statement(take.words, change.words, say),
        program=right,
        solve=solve,
        draw=draw,
        slips={name: program for name, program in slips.items() if program != right},
    )


def _program(condition: str, change: str, say: str) -> str:
    where = f" if {condition}" if condition else ""
    chosen = f"[{change} for x in a{where}]" if where or change != "x" else "a"
    return f"{READ}print({say.format(chosen)})\n"


def _statement(take: str, change: str, say: Say) -> str:
    which = f"those {take}" if take else "all of them"
    what = f"{change} {which}".strip()
    task = f"{what} {say.words}" if say.many else f"{say.words} {what}"
    return f"The input is one line of integers. Print {task}."
