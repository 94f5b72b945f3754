"""The league of a run: opponent pool, ratings, results and collapse alarm, their state in checkpoints, and its log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from agentrl.config.self_play import MIRROR, PAST, AlarmConfig, PoolConfig, SelfPlayConfig, is_fixed, label
from agentrl.core.atomic_files import append, write_atomically
from agentrl.core.errors import ConfigError
from agentrl.core.reading import decode_step_row, reading
from agentrl.core.types import Rollout
from agentrl.self_play.games import POLICY, Game, WinTable, rollout_score
from agentrl.self_play.opponents import step_opponents
from agentrl.self_play.ratings import Ratings

_CHOICE = 0x706F6F6C
"""Keeps these random numbers apart from others of the same seed and step."""


def snapshot_name(step: int) -> str:
    """Return the name of a snapshot, as a player and as a folder."""
    return f"step_{step:06d}"


def snapshot_step(name: str) -> int:
    """Return the step of a snapshot by its name."""
    return int(name.removeprefix("step_"))


@dataclass(slots=True)
class OpponentPool:
    """The snapshots of a run, by the step after which they were taken."""

    config: PoolConfig
    steps: list[int] = field(default_factory=list)
    """In ascending order."""

    @property
    def names(self) -> list[str]:
        """Names of the snapshots, the newest last."""
        return [snapshot_name(step) for step in self.steps]

    def due(self, step: int) -> bool:
        """Return whether a snapshot is to be taken after ``step``; never twice."""
        return step % self.config.snapshot_every == 0 and step not in self.steps

    def add(self, step: int, best: int | None = None) -> list[int]:
        """Add a snapshot and return those that are given up for it.

        Args:
            step: of the snapshot.
            best: of the snapshot with the best rating, which stays.
        """
        self.steps = sorted({*self.steps, step})
        dropped = []
        while len(self.steps) > max(self.config.keep, 1) and (redundant := self._least_needed(best)) is not None:
            self.steps.remove(redundant)
            dropped.append(redundant)
        return dropped

    def _least_needed(self, best: int | None) -> int | None:
        """Return the snapshot between whose neighbours the fewest steps are, the earlier of equal ones; None if all must stay."""
        if self.config.keep == 1:
            return self.steps[0]
        inner = zip(self.steps[:-2], self.steps[1:-1], self.steps[2:], strict=True)
        gaps = [(next_step - previous_step, step) for previous_step, step, next_step in inner if step != best]
        if gaps:
            return min(gaps)[1]
        return self.steps[0] if self.steps[0] != best else None

    def choose(self, seed: int, step: int, count: int, score: Callable[[str], float]) -> list[str]:
        """Return the names of up to ``count`` different snapshots that play in a step, a function of seed, step and scores.

        Args:
            seed: of the run.
            step: about to be sampled.
            count: how many can play at the same time.
            score: of the policy against a snapshot by name, from 0 to 1; for ``choose=pfsp``.
        """
        weights_N = self.weights([score(name) for name in self.names])
        if not len(weights_N):
            return []
        rng = np.random.default_rng([seed, step, _CHOICE])
        possible = int(np.count_nonzero(weights_N))
        chosen = rng.choice(len(weights_N), min(count, possible), replace=False, p=weights_N)
        return [snapshot_name(self.steps[number]) for number in chosen.tolist()]

    def weights(self, scores: Sequence[float]) -> NDArray[np.float64]:
        """Return the probability of each snapshot, ``[N]``, given the policy's scores against them.

        ``pfsp`` is prioritised fictitious self-play (AlphaStar, Nature 575:350, 2019) with ``(1 - score) ** power``. If the
        policy always wins against all of them, all are equally probable.
        """
        count, config = len(self.steps), self.config
        ages_N = np.arange(count)[::-1]
        weights_N: NDArray[np.float64] = np.ones(count)
        if config.choose == "latest":
            weights_N = (ages_N == 0).astype(np.float64)
        elif config.choose == "recent":
            weights_N = np.asarray(config.recency**ages_N, np.float64)
        elif config.choose == "pfsp":
            weights_N = (1 - np.array(scores, np.float64)) ** config.pfsp_power
        total = weights_N.sum()
        return weights_N / total if total > 0 else np.full(count, 1 / max(count, 1))


@dataclass(frozen=True, slots=True)
class StepPlay:
    """Statistics of the play of a step."""

    scores: Mapping[str, float]
    """Mean score of each role in mirror play, 1 for a win and 0.5 for a draw; empty without mirror play."""
    rewards: Mapping[str, float]
    """Mean reward of each role in mirror play."""
    tokens: float | None
    """Mean number of sampled tokens of an agent in an episode; None without episodes."""


def step_play(rollouts: Sequence[Rollout]) -> StepPlay:
    """Return the statistics of the policy's rollouts of a step."""
    mirror = [rollout for rollout in rollouts if rollout.opponent == MIRROR]
    return StepPlay(
        scores=_means((rollout.role, rollout_score(rollout)) for rollout in mirror),
        rewards=_means((rollout.role, rollout.reward) for rollout in mirror),
        tokens=float(np.mean([rollout.sampled_tokens for rollout in rollouts])) if rollouts else None,
    )


def _means(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the mean of the values of each name, in the order of names."""
    by_name: dict[str, list[float]] = {}
    for name, value in values:
        by_name.setdefault(name, []).append(value)
    return {name: float(np.mean(numbers)) for name, numbers in sorted(by_name.items())}


@dataclass(slots=True)
class CollapseAlarm:
    """Counts for how many steps each condition of ``self_play.alarm`` has held."""

    config: AlarmConfig
    first_tokens: float | None = None
    """Sampled tokens in the first step."""
    counts: dict[str, int] = field(default_factory=dict)
    """By key of the condition."""

    def update(self, play: StepPlay) -> list[str]:
        """Record a step and return a warning for each condition that has now held for ``steps`` steps.

        A step that does not show whether a condition holds, as one without mirror play, leaves its count as it is.
        """
        if self.first_tokens is None:
            self.first_tokens = play.tokens
        conditions = self._conditions(play)
        counts = self.counts | {key: self.counts.get(key, 0) + 1 if text else 0 for key, text in conditions.items()}
        self.counts = {key: count for key, count in counts.items() if count}
        return [
            f"{text} for {self.config.steps} steps (self_play.alarm.{key}): self-play has collapsed; go back to a checkpoint "
            "before it with more past and fixed opponents in self_play.mix, a KL term (algo.kl_coef) or algo.advantage.name=rae"
            for key, text in conditions.items()
            if text and self.counts[key] == self.config.steps
        ]

    def _conditions(self, play: StepPlay) -> dict[str, str]:
        """Return, of each condition that the step shows, how it holds in words; empty words if it does not."""
        config, conditions = self.config, {}
        if config.asymmetry is not None and len(play.scores) > 1:
            ranked = sorted(play.scores, key=lambda role: (play.scores[role], role))
            low, high = ranked[0], ranked[-1]
            holds = play.scores[high] - play.scores[low] >= config.asymmetry
            text = f"in mirror play {high} scored {play.scores[high]:.2f} and {low} {play.scores[low]:.2f}"
            conditions["asymmetry"] = text if holds else ""
        if config.reward is not None and play.rewards:
            role = max(play.rewards, key=lambda role: (abs(play.rewards[role]), role))
            holds = abs(play.rewards[role]) >= config.reward
            text = f"in mirror play the mean reward of {role} was {play.rewards[role]:.2f}"
            conditions["reward"] = text if holds else ""
        if config.length_share is not None and play.tokens is not None and self.first_tokens:
            holds = play.tokens < config.length_share * self.first_tokens
            text = f"agents sampled {play.tokens:.1f} tokens an episode, in the first step {self.first_tokens:.1f}"
            conditions["length_share"] = text if holds else ""
        return conditions

    def state(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        return {"first_tokens": self.first_tokens, "counts": dict(self.counts)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self.first_tokens, self.counts = state["first_tokens"], dict(state["counts"])


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
    """Seed of the run."""
    pool: OpponentPool = field(init=False)
    ratings: Ratings = field(default_factory=Ratings)
    """Ratings of the policy, all snapshots that there were, and scripted players."""
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
        scores = _means((f"role={rollout.role}", rollout_score(rollout)) for rollout in rollouts)
        opponents = [
            (game.players[opponent_seat], game.score(seat, opponent_seat))
            for game in games
            for seat, opponent_seat in policy_seat_pairs(game)
        ]
        scores |= _means((label(name) if is_fixed(name) else PAST, score) for name, score in opponents)
        metrics |= {f"self_play/score/{name}": score for name, score in scores.items()}
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


FILE = "league.jsonl"


class LeagueLog:
    """Appends a line for each step.

    Args:
        folder: of the run.
        resume_after: lines of later steps are removed by `begin`, because these steps are run again; None removes all.

    Raises:
        ConfigError: the log of the run that is resumed is damaged.
    """

    def __init__(self, folder: Path, resume_after: int | None) -> None:
        self._path = folder / FILE
        self._rows = [] if resume_after is None else [row for row in _rows(self._path) if row["step"] <= resume_after]

    def begin(self) -> LeagueLog:
        """Write the lines of the run that is resumed, and no others."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(self._path) as partial:
            partial.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in self._rows))
        return self

    def write(self, step: int, league: League) -> None:
        """Append a step."""
        self._append({"step": step, "ratings": league.ratings.state(), "results": league.results.state()})

    def write_evaluation(self, step: int, reports: Mapping[str, Any]) -> None:
        """Append an evaluation after a step: its sets with opponents by name."""
        self._append({"step": step, "evaluation": dict(reports)})

    def _append(self, row: Mapping[str, Any]) -> None:
        append(self._path, orjson.dumps(row) + b"\n")


def read_league(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's steps, in their order.

    Raises:
        ConfigError: the folder is that of no run with self-play.
    """
    path = folder / FILE
    if not (steps := [row for row in _rows(path) if "ratings" in row]):
        raise ConfigError(f"{folder} has no {FILE} with a step: name the folder of a run with self_play")
    return steps


def check_league(folder: Path) -> None:
    """Check the league's log of a run, if it has one.

    Raises:
        ConfigError: it is damaged; the message has the line.
    """
    _rows(folder / FILE)


def last_evaluation(folder: Path) -> dict[str, Any] | None:
    """Return the line of a run's last evaluation with opponents; None if there is none."""
    return next((row for row in reversed(_rows(folder / FILE)) if "evaluation" in row), None)


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines; a kill may leave a part of the last one."""
    if not path.is_file():
        return []
    with reading(path, "record of a league"):
        lines = path.read_bytes().split(b"\n")[:-1]
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        location = f"{path}, line {number}"
        rows.append(decode_step_row(line, location)[1])
        with reading(location, "row of a league"):
            if "ratings" in rows[-1]:
                Ratings.from_state(rows[-1]["ratings"])
                WinTable.from_state(rows[-1]["results"])
            for report in rows[-1].get("evaluation", {}).values():
                seats = {seat for _, _, seat in WinTable.from_state(report["results"]).records}
                for seat in seats:
                    float(report["reward"][str(seat)])
    return rows
