"""Ratings of players with their uncertainty: Plackett-Luce by ``openskill``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from agentrl.self_play.games import Game

if TYPE_CHECKING:
    from openskill.models import PlackettLuce

START_MU, START_SIGMA = 25.0, 25.0 / 3
"""The rating of an unknown player, as openskill has it."""


class Rating(NamedTuple):
    """A player's strength is normally distributed; JSON has it as a list."""

    mu: float = START_MU
    """Mean."""
    sigma: float = START_SIGMA
    """Standard deviation: the uncertainty."""

    @property
    def low(self) -> float:
        """A strength that the player has very likely, ``mu - 3 sigma``: what players are compared by."""
        return self.mu - 3 * self.sigma


@dataclass(slots=True)
class Ratings:
    """The ratings of all players of a run."""

    table: dict[str, Rating] = field(default_factory=dict)

    def rating(self, player: str) -> Rating:
        """Return a player's rating; that of an unknown player before its first game."""
        return self.table.get(player, Rating())

    def update(self, games: Iterable[Game], changing: Mapping[str, float] | None = None) -> None:
        """Update the ratings by games, in the order of their episodes. Mirror games say nothing and are left out.

        A player in several seats gets the changes of all of them.

        Args:
            games: of one step.
            changing: players whose strength has changed since the last games, by the standard deviation of the change:
                it is added to their uncertainty first.
        """
        for player, change in (changing or {}).items():
            mu, sigma = self.rating(player)
            self.table[player] = Rating(mu, min((sigma**2 + change**2) ** 0.5, START_SIGMA))
        model = _model()
        for game in sorted(games, key=lambda game: game.episode):
            if len(set(game.players)) > 1:
                self._rate(model, game)

    def _rate(self, model: PlackettLuce, game: Game) -> None:
        previous = [[model.create_rating(list(self.rating(player)))] for player in game.players]
        updated = model.rate(previous, scores=list(game.rewards))
        for player in dict.fromkeys(game.players):
            seats = [rating for name, (rating,) in zip(game.players, updated, strict=True) if name == player]
            mu, sigma = self.rating(player)
            others = len(seats) - 1
            mu = sum(float(rating.mu) for rating in seats) - others * mu
            self.table[player] = Rating(mu, math.prod(float(rating.sigma) for rating in seats) / sigma**others)

    def copy(self, player: str, name: str) -> None:
        """Give a new player the rating of another, of which it is a copy."""
        self.table[name] = self.rating(player)

    def ranking(self) -> list[str]:
        """Return all players, the strongest first."""
        return sorted(self.table, key=lambda player: (-self.table[player].mu, player))

    def state(self) -> dict[str, Sequence[float]]:
        """Return the ratings, JSON-able."""
        return {player: list(rating) for player, rating in sorted(self.table.items())}

    @classmethod
    def from_state(cls, state: Mapping[str, Sequence[float]]) -> Ratings:
        """Return the ratings of `state`."""
        return cls({str(player): Rating(float(mu), float(sigma)) for player, (mu, sigma) in state.items()})


def _model() -> PlackettLuce:
    from openskill.models import PlackettLuce

    return PlackettLuce(tau=0.0)  # players change only by `changing`
