"""What a programming problem is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with its solution. It runs nothing but plain functions of this package."""

    family: str
    """Which kind of problem it is."""
    key: str
    """What makes it another problem than its family's others; problems of one key differ in their tests alone."""
    statement: str
    """The problem in words, without examples."""
    program: str
    """The reference solution, as a policy would hand it in."""
    solve: Callable[[str], str]
    """The same as a function of ours, from standard input to standard output: it makes the tests."""
    draw: Callable[[Random], str]
    """Draws an input."""
    slips: Mapping[str, str] = field(default_factory=dict)
    """Programs with a mistake, by the mistake's name."""


@dataclass(frozen=True, slots=True)
class Example:
    """One test."""

    given: str
    """What the program reads."""
    wanted: str
    """What it is to print."""


def examples(problem: Problem, rng: Random, count: int) -> list[Example]:
    """Return ``count`` tests with inputs that differ from each other; fewer where hardly any differ."""
    found: dict[str, Example] = {}
    for _ in range(20 * count):
        given = problem.draw(rng)
        found.setdefault(given, Example(given, problem.solve(given)))
        if len(found) == count:
            break
    return list(found.values())
