"""Generated problems as tasks: training and held-out problems share no problem."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from random import Random
from typing import overload

from agentrl.task import Task
from agentrl.types import Message

from .families import FAMILIES, Problem

_HELD_OUT = 0.1
"""Share of all problems that is kept for ``eval``."""


class Generated(Sequence[Task]):
    """The tasks of a split, each made from its own seed when it is asked for."""

    def __init__(self, split: str, size: int, families: Sequence[str], levels: Sequence[int], seed: int) -> None:
        """Draw from ``families`` in turn, of ``levels`` only; each family has one of them."""
        self._split = split
        self._size = size
        self._families = tuple(families)
        self._levels = frozenset(levels)
        self._seed = seed

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [self._task(number) for number in range(*index.indices(self._size))]
        if not -self._size <= index < self._size:
            raise IndexError(f"task {index} of {self._size} in split {self._split!r}")
        return self._task(index % self._size)

    def __iter__(self) -> Iterator[Task]:
        return (self._task(number) for number in range(self._size))

    def _task(self, index: int) -> Task:
        family = self._families[index % len(self._families)]
        problem = self._draw(family, Random(f"{self._seed}/{self._split}/{index}"))
        return Task(
            id=f"math_problems/{self._split}/{index}",
            prompt=(Message("user", problem.text),),
            answer=problem.answer,
            metadata={
                "family": family,
                "level": problem.level,
                "code": problem.code,
                "wrong": list(problem.wrong),
            },
        )

    def _draw(self, family: str, rng: Random) -> Problem:
        """Draw until a problem is of this split and of the levels asked for."""
        while True:
            problem = FAMILIES[family].draw(rng)
            if problem.level in self._levels and is_held_out(problem) == (self._split == "eval"):
                return problem


def is_held_out(problem: Problem) -> bool:
    """Return whether a problem is for evaluation only. It hangs on what is computed, however that is put in words."""
    digest = hashlib.sha256(problem.code.encode()).digest()
    return int.from_bytes(digest[:4], "big") < _HELD_OUT * 2**32
