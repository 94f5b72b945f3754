"""A scripted player of both roles that makes mistakes."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from agentrl_envs.solver_critic.players import careless_sum

from agentrl import Message

_EASY = 0.8
"""Share of problems with one number up to `_SMALL`."""
_SMALL = 3
_SLIPS = 0.2


class CarelessPlayer:
    """Sets mostly problems with a small number, and solves sums as `careless_sum` does; other results are at times off by one."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def act(self, messages: tuple[Message, ...], legal_moves: Sequence[str]) -> str:
        """Return a problem or an answer."""
        rng = self._rng
        if found := re.fullmatch(r"(\d+) ([-+*]) (\d+) = \?", messages[-1].content):
            a, b = int(found[1]), int(found[3])
            if found[2] == "+":
                return str(careless_sum(a, b, rng))
            right = a - b if found[2] == "-" else a * b
            return str(right + (int(rng.choice([-1, 1])) if rng.random() < _SLIPS else 0))
        easy = [move for move in legal_moves if int(move.rpartition(" ")[2]) <= _SMALL]
        moves = easy if rng.random() < _EASY else legal_moves
        return str(moves[int(rng.integers(len(moves)))])
