"""The league of a run: opponent pool, ratings, results and collapse alarm, and their state in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentrl.config.self_play import PAST, SelfPlayConfig, is_fixed, label
from agentrl.core.types import Rollout
from agentrl.self_play.collapse import CollapseAlarm, step_play
from agentrl.self_play.games import POLICY, Game, WinTable, rollout_score
from agentrl.self_play.opponents import step_opponents
from agentrl.self_play.pool import OpponentPool, snapshot_name, snapshot_step
from agentrl.self_play.ratings import Ratings

POLICY_CHANGE = 0.3
"""Standard deviation of the change of the policy's strength in a step of training, on the scale of ratings."""


def policy_seat_pairs(game: Game) -> list[tuple[int, int]]:
    """Return the seats of the policy, each with each seat of another player."""
    mine = [seat for seat, player in enumerate(game.players) if player == POLICY]
    opponent_seats = [seat for seat, player in enumerate(game.players) if player != POLICY]
    return [(seat, opponent_seat) for seat in mine for opponent_seat in opponent_seats]


@dataclass(slots=True)
class League:
    """All that self-play remembers from step to step."""

    config: SelfPlayConfig
    seed: int
    """Of the run."""
    pool: OpponentPool = field(init=False)
    ratings: Ratings = field(default_factory=Ratings)
    """Of the policy, all snapshots that there were, and scripted players."""
    results: WinTable = field(default_factory=WinTable)
    """All games of the run."""
    recent: WinTable = field(default_factory=WinTable)
    """The same with less weight for earlier steps: what ``pfsp`` chooses by."""
    alarm: CollapseAlarm = field(init=False)

    def __post_init__(self) -> None:
        """Begin without snapshots."""
        self.pool = OpponentPool(self.config.pool)
        self.alarm = CollapseAlarm(self.config.alarm)

    def add_snapshot(self, step: int) -> None:
        """Add the policy after ``step``, with the policy's rating, to the pool, which may give up another snapshot."""
        best = max(self.pool.names, key=lambda name: self.ratings.rating(name).low, default=None)
        self.ratings.copy(POLICY, snapshot_name(step))
        for dropped in self.pool.add(step, None if best is None else snapshot_step(best)):
            self.recent.forget(snapshot_name(dropped))

    def opponents(self, step: int, tasks: int) -> list[str]:
        """Return the opponents of the tasks of a step (from 1); see `step_opponents`."""

        def score(name: str) -> float:
            return self.recent.record(POLICY, name).expected_score

        chosen = self.pool.choose(self.seed, step, self.config.engines, score)
        return step_opponents(self.config, tasks=tasks, seed=self.seed, step=step, snapshots=chosen)

    def record(self, games: Sequence[Game], rollouts: Sequence[Rollout]) -> tuple[dict[str, float], list[str]]:
        """Record a step that was trained. Return its metrics, and warnings of the alarm.

        Args:
            games: all that were played to their end.
            rollouts: of the policy in these games.
        """
        self.ratings.update(games, changing={POLICY: POLICY_CHANGE})
        self.results.add(games)
        self.recent.decay(self.config.pool.score_decay)
        self.recent.add(games)
        play = step_play(rollouts)
        rating = self.ratings.rating(POLICY)
        metrics = {
            "self_play/rating": rating.mu,
            "self_play/rating_sigma": rating.sigma,
            "self_play/snapshots": float(len(self.pool.steps)),
        }
        if play.scores:
            metrics["self_play/asymmetry"] = max(play.scores.values()) - min(play.scores.values())
        for role, reward in play.rewards.items():
            metrics[f"self_play/mirror_reward/{role}"] = reward
        for role in sorted({rollout.role for rollout in rollouts}):
            by_role = [rollout_score(rollout) for rollout in rollouts if rollout.role == role]
            metrics[f"self_play/score/role={role}"] = float(np.mean(by_role))
        scores: dict[str, list[float]] = {}
        for game in games:
            for seat, opponent_seat in policy_seat_pairs(game):
                opponent = game.players[opponent_seat]
                kind = label(opponent) if is_fixed(opponent) else PAST
                scores.setdefault(kind, []).append(game.score(seat, opponent_seat))
        metrics |= {
            f"self_play/score/{kind}": float(np.mean(kind_scores)) for kind, kind_scores in sorted(scores.items())
        }
        return metrics, self.alarm.update(play)

    def state(self) -> dict[str, Any]:
        """Return the league, JSON-able."""
        return {
            "snapshots": list(self.pool.steps),
            "ratings": self.ratings.state(),
            "results": self.results.state(),
            "recent": self.recent.state(),
            "alarm": self.alarm.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self.pool.steps = [int(step) for step in state["snapshots"]]
        self.ratings = Ratings.from_state(state["ratings"])
        self.results = WinTable.from_state(state["results"])
        self.recent = WinTable.from_state(state["recent"])
        self.alarm.load(state["alarm"])
