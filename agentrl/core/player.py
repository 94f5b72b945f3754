"""Scripted players of multi-agent environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from agentrl.core.types import Message


class Player(Protocol):
    """Plays one agent in one episode, without a model."""

    def act(self, messages: tuple[Message, ...], legal_moves: Sequence[str]) -> str:
        """Return the text of the agent's turn.

        Args:
            messages: added since its last turn.
            legal_moves: ``legal_moves`` of the agent's ``info``; empty in an environment that lists none.
        """
        ...


PlayerFactory = Callable[[np.random.Generator], Player]
"""Makes the player of an episode; the generator is its only source of randomness."""


class RandomPlayer:
    """Takes each legal move with the same probability."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def act(self, messages: tuple[Message, ...], legal_moves: Sequence[str]) -> str:
        """Return a legal move; an empty text if none is listed."""
        return legal_moves[int(self._rng.integers(len(legal_moves)))] if legal_moves else ""
