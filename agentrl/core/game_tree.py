"""The contract of small games whose whole tree can be walked."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol, TypeVar

S = TypeVar("S", bound=Hashable)
CHANCE = -1
"""The player of a state in which a random event follows."""


class GameTree(Protocol[S]):
    """A game with perfect recall. What follows a state depends on the state alone."""

    def root(self) -> S:
        """Return the first state."""
        ...

    def player(self, state: S) -> int | None:
        """Return who moves: 0, 1 or `CHANCE`; None if the game is over."""
        ...

    def chances(self, state: S) -> Mapping[str, float]:
        """Return the probability of each random event."""
        ...

    def actions(self, state: S) -> Sequence[str]:
        """Return the legal actions."""
        ...

    def child(self, state: S, action: str) -> S:
        """Return the state after an action or a random event."""
        ...

    def information_set(self, state: S) -> Hashable:
        """Return what the player who moves knows: equal for states that this player cannot tell apart."""
        ...

    def payoff(self, state: S, player: int) -> float:
        """Return a player's payoff at the end."""
        ...
