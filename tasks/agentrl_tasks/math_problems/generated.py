"""Generated problems as tasks; training and evaluation have no problem in common."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from random import Random

from agentrl import MadeTasks, Message, Task

from .families import FAMILIES, Problem

_HELD_OUT = 0.1
"""Fraction of all problems that is held out for ``eval``."""


class Generated(MadeTasks):
    """The tasks of a split, each generated from a separate seed on access."""

    def __init__(self, split: str, size: int, families: Sequence[str], levels: Sequence[int], seed: int) -> None:
        """Alternate ``families``, with problems of ``levels``; each family must have one of them."""
        super().__init__(split, size)
        self._families = tuple(families)
        self._levels = frozenset(levels)
        self._seed = seed

    def make(self, index: int) -> Task:
        """Return task ``index``."""
        family = self._families[index % len(self._families)]
        problem = self._draw(family, Random(f"{self._seed}/{self.split}/{index}"))
        return Task(
            id=f"math_problems/{self.split}/{index}",
            prompt=(Message("user", problem.text),),
            answer=problem.answer,
            metadata={"family": family, "level": problem.level, "code": problem.code, "wrong": list(problem.wrong)},
        )

    def _draw(self, family: str, rng: Random) -> Problem:
        """Draw until a problem belongs to this split and has one of the levels."""
        while True:
            problem = FAMILIES[family].draw(rng)
            if problem.level in self._levels and is_held_out(problem) == (self.split == "eval"):
                return problem


def is_held_out(problem: Problem) -> bool:
    """Return whether a problem is for evaluation only. It hangs on what is computed, however that is put in words."""
    digest = hashlib.sha256(problem.code.encode()).digest()
    return int.from_bytes(digest[:4], "big") < _HELD_OUT * 2**32
