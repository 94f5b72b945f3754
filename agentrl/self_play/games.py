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

    def score(self, seat: int, opponent_seat: int) -> float:
        """Return the result of one seat against another: 1 for the larger reward, 0.5 for equal ones, else 0."""
        mine, theirs = self.rewards[seat], self.rewards[opponent_seat]
        return 1.0 if mine > theirs else 0.5 if mine == theirs else 0.0


def rollout_score(rollout: Rollout) -> float:
    """Return the score of a rollout's seat against the best of the other seats; 0.5 without others."""
    opponent_rewards = [reward for seat, reward in enumerate(rollout.seat_rewards) if seat != rollout.seat]
    return Game(rollout.episode, (), (rollout.reward, max(opponent_rewards, default=rollout.reward))).score(0, 1)


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

    @property
    def expected_score(self) -> float:
        """Mean score with two draws more: between 0 and 1, and near 0.5 after few games, or if all are long past."""
        return (self.wins + self.draws / 2 + 1) / (self.games + 2)

    def add(self, score: float) -> None:
        """Count a game."""
        if score == 0.5:
            self.draws += 1
        elif score:
            self.wins += 1
        else:
            self.losses += 1

    def plus(self, record: Record) -> Record:
        """Return both together."""
        return Record(self.wins + record.wins, self.draws + record.draws, self.losses + record.losses)

    def minus(self, record: Record) -> Record:
        """Return what was added since ``record``."""
        return Record(self.wins - record.wins, self.draws - record.draws, self.losses - record.losses)


@dataclass(slots=True)
class WinTable:
    """Results of every pair of players, by the seat of the first. In games of more than two, each pair of seats counts."""

    records: dict[tuple[str, str, int], Record] = field(default_factory=dict)
    """By player, opponent and the player's seat."""

    def add(self, games: Iterable[Game]) -> None:
        """Count games, mirror play included."""
        for game in games:
            for seat, player in enumerate(game.players):
                for opponent_seat, opponent in enumerate(game.players):
                    if seat != opponent_seat:
                        self.records.setdefault((player, opponent, seat), Record()).add(game.score(seat, opponent_seat))

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
        total = Record()
        for key, record in self.records.items():
            if key[:2] == (player, opponent) and seat in (None, key[2]):
                total = total.plus(record)
        return total

    def asymmetry(self, player: str, opponent: str) -> float:
        """Return the largest difference of the player's scores between two seats; 0 with fewer than two seats."""
        scores = [record.score for key, record in self.records.items() if key[:2] == (player, opponent)]
        return max(scores) - min(scores) if scores else 0.0

    def state(self) -> list[list[Any]]:
        """Return the table as JSON-able rows."""
        return [[*key, record.wins, record.draws, record.losses] for key, record in sorted(self.records.items())]

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
    played = [rollout for rollout in rollouts if rollout.failure is None and rollout.seat_rewards]
    results, games = WinTable(), {rollout.episode: _game(rollout) for rollout in played}
    results.add(games.values())
    rewards_by_seat: dict[int, list[float]] = {}
    for rollout in played:
        rewards_by_seat.setdefault(rollout.seat, []).append(rollout.reward)
    return {
        "results": [row for row in results.state() if row[0] == POLICY],
        "reward": {str(seat): sum(rewards) / len(rewards) for seat, rewards in sorted(rewards_by_seat.items())},
    }


def _game(rollout: Rollout) -> Game:
    opponent = POLICY if rollout.opponent == MIRROR else rollout.opponent
    players = tuple(POLICY if seat == rollout.seat else opponent for seat in range(len(rollout.seat_rewards)))
    return Game(rollout.episode, players, rollout.seat_rewards)
