"""A scripted player of both roles, which makes mistakes."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from agentrl import Message

_FORGETS_CARRY, _SLIPS, _MISJUDGES = 0.4, 0.3, 0.35
"""Probabilities of mistakes."""


def careless_sum(a: int, b: int, rng: np.random.Generator) -> int:
    """Return the sum of two numbers with mistakes: at times without the carry of the last digits, or off by one."""
    forgets = a % 10 + b % 10 >= 10 and rng.random() < _FORGETS_CARRY
    return add_slip(a + b - 10 * forgets, rng)


def add_slip(result: int, rng: np.random.Generator) -> int:
    """Return a result, at times off by one."""
    return result + (int(rng.choice([-1, 1])) if rng.random() < _SLIPS else 0)


class CarelessPlayer:
    """Adds as `careless_sum` does, misjudges a third of the answers, and believes every verdict.

    After ``right`` it repeats its answer, after ``wrong`` it gives another one. A text that is no sum gets a random legal move.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._problem: tuple[int, int] | None = None
        self._answer = 0

    def act(self, messages: tuple[Message, ...], legal_moves: Sequence[str]) -> str:
        """Return an answer or a verdict."""
        text = messages[-1].content
        if problem := re.fullmatch(r"(\d+) \+ (\d+) = \?", text):
            self._problem = int(problem[1]), int(problem[2])
            self._answer = careless_sum(*self._problem, self._rng)
        elif judged := re.fullmatch(r"(\d+) \+ (\d+) = \? Answer: (.*)\. Right or wrong\?", text):
            is_right = judged[3] == str(int(judged[1]) + int(judged[2]))
            return "right" if is_right != (self._rng.random() < _MISJUDGES) else "wrong"
        elif self._problem is None:
            return legal_moves[int(self._rng.integers(len(legal_moves)))]
        elif text.startswith("wrong"):
            wrong_answer = self._answer
            while self._answer == wrong_answer:
                self._answer = careless_sum(*self._problem, self._rng)
        return str(self._answer)
