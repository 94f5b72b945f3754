"""A scripted player of both roles, which makes mistakes."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from agentrl import Message
from agentrl_envs.solver_critic.players import add_slip, careless_sum

_EASY = 0.5
"""Share of problems with a number up to `_SMALL`, on top of those that chance gives."""
_SMALL = 3


class CarelessPlayer:
    """Sets many problems with a small number, solves sums as `careless_sum` does, and other problems at times off by one."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def act(self, messages: tuple[Message, ...], legal_moves: Sequence[str]) -> str:
        """Return a problem or an answer."""
        if problem := re.fullmatch(r"(\d+) ([-+*]) (\d+) = \?", messages[-1].content):
            a, b = int(problem[1]), int(problem[3])
            if problem[2] == "+":
                return str(careless_sum(a, b, self._rng))
            return str(add_slip(a - b if problem[2] == "-" else a * b, self._rng))
        easy = [move for move in legal_moves if int(move.rpartition(" ")[2]) <= _SMALL]
        moves = easy if self._rng.random() < _EASY else legal_moves
        return str(moves[int(self._rng.integers(len(moves)))])
