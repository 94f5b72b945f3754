"""A programming problem and its tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with its solution. Only functions of this package compute the tests; no program is run."""

    family: str
    """Kind of problem."""
    key: str
    """Identifies the problem within its family; problems with the same key differ only in their tests."""
    statement: str
    """Text of the problem, without examples."""
    program: str
    """The reference solution, a Python program."""
    solve: Callable[[str], str]
    """The solution as a function from standard input to standard output; computes the tests."""
    draw: Callable[[Random], str]
    """Draws an input."""
    slips: Mapping[str, str] = field(default_factory=dict)
    """Wrong programs, by the name of the mistake."""


@dataclass(frozen=True, slots=True)
class Example:
    """A test: input and expected output."""

    input: str
    """Standard input."""
    output: str
    """Expected standard output."""


def examples(problem: Problem, rng: Random, count: int) -> list[Example]:
    """Return ``count`` tests with distinct inputs; fewer if too few distinct ones are drawn."""
    example_by_input: dict[str, Example] = {}
    for _ in range(20 * count):
        text = problem.draw(rng)
        example_by_input.setdefault(text, Example(text, problem.solve(text)))
        if len(example_by_input) == count:
            break
    return list(example_by_input.values())
