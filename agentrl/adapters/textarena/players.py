"""Scripted players of TextArena's games."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from agentrl.core.types import Message


class RandomPlayer:
    """Takes one of the moves in brackets of the last message that has some, each with the same probability."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def act(self, messages: tuple[Message, ...], legal_moves: Sequence[str]) -> str:
        """Return a move in brackets; ``[0]`` if no message has any."""
        for message in reversed(messages):
            moves = re.findall(r"'(\[[^\]\n]+\])'", message.content)
            if moves:
                return str(moves[int(self._rng.integers(len(moves)))])
        return "[0]"
