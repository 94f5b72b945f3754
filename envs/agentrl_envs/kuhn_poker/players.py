"""Scripted players of Kuhn poker."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from agentrl import Message

NASH = {
    ("J", "none"): 1 / 3,
    ("Q", "none"): 0.0,
    ("K", "none"): 1.0,
    ("J", "check"): 1 / 3,
    ("Q", "check"): 0.0,
    ("K", "check"): 1.0,
    ("J", "bet"): 0.0,
    ("Q", "bet"): 1 / 3,
    ("K", "bet"): 1.0,
    ("J", "check bet"): 0.0,
    ("Q", "check bet"): 2 / 3,
    ("K", "check bet"): 1.0,
}
"""Probability of ``bet`` or ``call``, by card and moves so far, in the equilibrium in which the first player bets most often
(Kuhn 1950, with alpha = 1/3)."""


class NashPlayer:
    """Plays a Nash equilibrium: it loses at most 1/18 a game as the first player, and wins at least 1/18 as the second."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def act(self, messages: tuple[Message, ...], legal_moves: Sequence[str]) -> str:
        """Return a move."""
        card_and_moves = re.search(r"card: (\w)\w+\. Moves: ([\w ]+)\.", messages[-1].content)
        assert card_and_moves is not None, "the text of a state has card and moves"
        passive, active = legal_moves
        return active if self._rng.random() < NASH[card_and_moves[1].upper(), card_and_moves[2]] else passive
