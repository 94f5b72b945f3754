"""Results of games: who played in which seat, and the table of wins by seat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.config.self_play import MIRROR
from agentrl.core.types import Rollout

POLICY = "policy"
"""The name of the policy that is trained, as a player."""


@dataclass(frozen=True, slots=True)
class Game:
    """The result of one episode."""

    episode: str
    """Its id."""
    players: tuple[str, ...]
    """By seat: `POLICY`, a snapshot's name, or that of a scripted player."""
    rewards: tuple[float, ...]
    """By seat."""

    def score(self, seat: int, other: int) -> float:
        """Return the result of one seat against another: 1 for the larger reward, 0.5 for equal ones, else 0."""
        mine, theirs = self.rewards[seat], self.rewards[other]
        return 1.0 if mine > theirs else 0.5 if mine == theirs else 0.0


def rollout_score(rollout: Rollout) -> float:
    """Return the score of a rollout's seat against the best of the other seats; 0.5 without others."""
    others = [reward for seat, reward in enumerate(rollout.seat_rewards) if seat != rollout.seat]
    return Game(rollout.episode, (), (rollout.reward, max(others, default=rollout.reward))).score(0, 1)


@dataclass(slots=True)
class Record:
    """Results of a player in one seat against another player; counts, or sums of weights after `WinTable.decay`."""

    wins: float = 0.0
    draws: float = 0.0
    losses: float = 0.0

    @property
    def games(self) -> float:
        """Number of games."""
        return self.wins + self.draws + self.losses

    @property
    def score(self) -> float:
        """Mean score, with 1 for a win and 0.5 for a draw; 0.5 without games."""
        return (self.wins + self.draws / 2) / self.games if self.games else 0.5

    def add(self, score: float) -> None:
        """Count a game."""
        if score == 0.5:
            self.draws += 1
        elif score:
            self.wins += 1
        else:
            self.losses += 1

    def plus(self, other: Record) -> Record:
        """Return both together."""
        return Record(self.wins + other.wins, self.draws + other.draws, self.losses + other.losses)

    def minus(self, other: Record) -> Record:
        """Return what was added since ``other``."""
        return Record(self.wins - other.wins, self.draws - other.draws, self.losses - other.losses)


@dataclass(slots=True)
class WinTable:
    """Results of every pair of players, by the seat of the first. In games of more than two, each pair of seats counts."""

    records: dict[tuple[str, str, int], Record] = field(default_factory=dict)
    """By player, opponent and the player's seat."""

    def add(self, games: Iterable[Game]) -> None:
        """Count games, mirror play included."""
        for game in games:
            for seat, player in enumerate(game.players):
                for other, opponent in enumerate(game.players):
                    if seat != other:
                        self.records.setdefault((player, opponent, seat), Record()).add(game.score(seat, other))

    def decay(self, factor: float) -> None:
        """Multiply the weight of all games so far."""
        for record in self.records.values():
            record.wins *= factor
            record.draws *= factor
            record.losses *= factor

    def forget(self, player: str) -> None:
        """Remove a player."""
        self.records = {key: record for key, record in self.records.items() if player not in key[:2]}

    def record(self, player: str, opponent: str, seat: int | None = None) -> Record:
        """Return the results of a player against an opponent in a seat, or in all of them."""
        found = Record()
        for (one, other, at), record in self.records.items():
            if (one, other) == (player, opponent) and seat in (None, at):
                found = found.plus(record)
        return found

    def asymmetry(self, player: str, opponent: str) -> float:
        """Return the largest difference of the player's scores between two seats; 0 with fewer than two seats."""
        scores = [one.score for (name, other, _), one in self.records.items() if (name, other) == (player, opponent)]
        return max(scores) - min(scores) if scores else 0.0

    def state(self) -> list[list[Any]]:
        """Return the table as JSON-able rows."""
        return [[*key, one.wins, one.draws, one.losses] for key, one in sorted(self.records.items())]

    @classmethod
    def from_state(cls, rows: Sequence[Sequence[Any]]) -> WinTable:
        """Return the table of `state`."""
        return cls({(str(a), str(b), int(seat)): Record(*map(float, counts)) for a, b, seat, *counts in rows})


def game_metrics(rollout: Rollout) -> dict[str, float]:
    """Return score (1 for a win, 0.5 for a draw), win, draw and loss of a game; empty if it failed."""
    if rollout.failure is not None or not rollout.seat_rewards:
        return {}
    score = rollout_score(rollout)
    return {"score": score, "win": float(score == 1), "draw": float(score == 0.5), "loss": float(score == 0)}


def games_report(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return results of the policy's games (see `WinTable.state`) and its mean reward by seat, JSON-able.

    Args:
        rollouts: of a set with opponents; failed ones are left out.

    """
    played = [one for one in rollouts if one.failure is None and one.seat_rewards]
    results, games = WinTable(), {one.episode: _game(one) for one in played}
    results.add(games.values())
    by_seat: dict[int, list[float]] = {}
    for one in played:
        by_seat.setdefault(one.seat, []).append(one.reward)
    return {
        "results": [row for row in results.state() if row[0] == POLICY],
        "reward": {str(seat): sum(some) / len(some) for seat, some in sorted(by_seat.items())},
    }


def _game(rollout: Rollout) -> Game:
    other = POLICY if rollout.opponent == MIRROR else rollout.opponent
    players = tuple(POLICY if seat == rollout.seat else other for seat in range(len(rollout.seat_rewards)))
    return Game(rollout.episode, players, rollout.seat_rewards)
