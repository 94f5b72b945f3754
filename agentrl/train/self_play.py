"""Self-play in a training run: snapshots of the policy, the engines that play them, and the league's record."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl.config.learner import LoraConfig
from agentrl.config.self_play import PAST, SelfPlayConfig, is_fixed
from agentrl.core.lineup import Lineup, PolicySeat, Seat
from agentrl.core.sampler import Sampler
from agentrl.core.types import Rollout
from agentrl.episode.runner import Job
from agentrl.evaluation.exploitability import GameScores, PlayedStrategy
from agentrl.evaluation.opponents import fixed_seat, games_report
from agentrl.evaluation.result import SetResult
from agentrl.inference.base import EngineControl
from agentrl.inference.fleet.fleet import Fleet
from agentrl.learner.base import LearnerGroup
from agentrl.learner.checkpoints import STATE, whole_checkpoints
from agentrl.selfplay.games import POLICY, Game
from agentrl.selfplay.league import League
from agentrl.selfplay.league_log import LeagueLog
from agentrl.selfplay.pool import snapshot_name, step_of
from agentrl.selfplay.seating import Seating
from agentrl.weight_sync.adapter import load_policies, write_policies
from agentrl.weight_sync.disk import write_weights

_log = logging.getLogger(__name__)
SNAPSHOTS = "snapshots"
"""In the run folder: one folder of weights a snapshot."""


@dataclass(slots=True)
class OpponentEngine:
    """A fleet of one engine, which plays one snapshot at a time."""

    fleet: Fleet
    folder: Path
    """Of all snapshots."""
    snapshot: str | None = None
    """Name of the snapshot that it holds."""
    policies: Sequence[str] = ()
    """Of a run with several: a snapshot has adapters of each."""

    def __post_init__(self) -> None:
        """Let the engine load its snapshot again after a restart."""
        self.fleet.set_weight_sync(self._load_into)

    async def load(self, name: str) -> None:
        """Load a snapshot, unless the engine holds it.

        Raises:
            EngineError: the engine refuses it.

        """
        if name != self.snapshot:
            self.snapshot = name
            for engine in self.fleet.live:  # a restarted engine loads it then
                await self._load_into(engine)

    async def _load_into(self, engine: EngineControl) -> int:
        assert self.snapshot is not None, "load comes before the first request"
        version = step_of(self.snapshot)
        if self.policies:
            await load_policies(engine, self.folder / self.snapshot, self.policies, version)
        else:
            await engine.updates.from_disk(self.folder / self.snapshot, version)
        return version


@dataclass(slots=True)
class SelfPlay:
    """Plays a run's episodes with the opponents of ``self_play``."""

    config: SelfPlayConfig
    league: League
    agents: Sequence[str]
    """Of the environment, in the order of seats."""
    folder: Path
    """Of the run."""
    engines: Sequence[OpponentEngine]
    log: LeagueLog
    bucket_bytes: int
    """Size of a file of weights."""
    dtype: str | None
    """Of the written weights."""
    lora: LoraConfig | None = None
    """Of a run with several policies."""
    policies: Mapping[str, str] = field(default_factory=dict)
    """The policy of each agent, in such a run."""
    _seatings: dict[str, Seating] = field(default_factory=dict, init=False)
    """By episode of the step."""
    _played: list[Rollout] = field(default_factory=list, init=False)
    _metrics: dict[str, float] = field(default_factory=dict, init=False)
    _strategies: dict[str, PlayedStrategy] = field(default_factory=dict, init=False)
    """In a game with a tree, of snapshots by name."""

    async def on_weights(self, learner: LearnerGroup, step: int) -> None:
        """Take a snapshot of the policy after ``step``, if one is due.

        Raises:
            LearnerError, OSError: it cannot be written.

        """
        if PAST not in self.config.mix or not self.league.pool.due(step):
            return
        self.league.add_snapshot(step)
        folder = self.folder / SNAPSHOTS / self.league.pool.names[-1]
        if self.lora is None:
            await write_weights(learner, folder, bucket_bytes=self.bucket_bytes, dtype=self.dtype)
        else:
            await asyncio.to_thread(write_policies, learner, folder, self.lora, self.dtype)
        await asyncio.to_thread(self._remove_others)

    def _remove_others(self) -> None:
        """Remove snapshots that neither the pool nor a checkpoint has."""
        needed = set(self.league.pool.names)
        for checkpoint in whole_checkpoints(self.folder / "checkpoints"):
            needed |= snapshots_of(json.loads((checkpoint / STATE).read_bytes()))
        for path in (self.folder / SNAPSHOTS).iterdir():
            if path.name not in needed:
                shutil.rmtree(path)

    async def seat(self, step: int, jobs: Sequence[Job], samples: int) -> list[Job]:
        """Return the episodes of a step with their players, once engines hold the snapshots that play.

        Args:
            step: from 1.
            jobs: the episodes, those of a task next to each other.
            samples: episodes of a task.

        Raises:
            EngineError: an engine does not load a snapshot.

        """
        by_task = self.league.seatings(step, seats=len(self.agents), tasks=len(jobs) // samples, samples=samples)
        seatings = [one for of_task in by_task for one in of_task]
        samplers = await self._load(sorted({name for one in seatings for name in one.players if _is_snapshot(name)}))
        self._seatings = {job.rollout_id: one for job, one in zip(jobs, seatings, strict=True)}
        return [replace(job, lineup=self._lineup(one, samplers)) for job, one in zip(jobs, seatings, strict=True)]

    def _lineup(self, seating: Seating, samplers: Mapping[str, Sampler]) -> Lineup:
        seats: dict[str, Seat] = {}
        lineup = Lineup(seats, seating.opponent, self.policies)
        for agent, player in zip(self.agents, seating.players, strict=True):
            if is_fixed(player):
                seats[agent] = fixed_seat(player, self.config)
            elif player != POLICY:
                seats[agent] = PolicySeat(
                    lineup.policy(agent, ""), trained=False, sampler=samplers[player], name=player
                )
        return lineup

    async def _load(self, names: Sequence[str]) -> dict[str, Sampler]:
        held = {one.snapshot: one for one in self.engines if one.snapshot in names}
        free = iter([one for one in self.engines if one.snapshot not in names])
        chosen = {name: held[name] if name in held else next(free) for name in names}
        await asyncio.gather(*(one.load(name) for name, one in chosen.items()))
        return {name: one.fleet.sampler for name, one in chosen.items()}

    def played(self, rollouts: Sequence[Rollout]) -> None:
        """Take the rollouts of the step; `on_step_trained` records them."""
        self._played = [one for one in rollouts if not one.dropped and one.failure is None]

    def on_step_trained(self, step: int) -> None:
        """Record the games of the step."""
        rewards = {one.episode: one.seat_rewards for one in self._played}
        games = [Game(name, self._seatings[name].players, found) for name, found in rewards.items()]
        self._metrics, warnings = self.league.record(games, self._played)
        for text in warnings:
            _log.warning("step %d: %s", step, text)
        self.log.write(step, self.league)
        self._played, self._seatings = [], {}

    def on_evaluated(self, step: int, results: Sequence[SetResult]) -> None:
        """Write the results of an evaluation with opponents."""
        found = {one.eval_set.full_name: games_report(one.rollouts) for one in results if one.eval_set.lineups}
        if found:
            self.log.write_evaluation(step, found)

    async def snapshot_strategies(self, scores: GameScores) -> list[PlayedStrategy]:
        """Return how each snapshot of the pool plays. A new one is loaded into an engine first.

        Raises:
            EngineError: an engine does not load it, or fails.

        """
        names = self.league.pool.names
        for name in names if self.engines else ():
            if name not in self._strategies:
                engine = next((one for one in self.engines if one.snapshot == name), self.engines[0])
                await engine.load(name)
                self._strategies[name] = await scores.strategy_of(engine.fleet)
        self._strategies = {name: one for name, one in self._strategies.items() if name in names}
        return list(self._strategies.values())

    def standing(self) -> dict[str, float]:
        """Return ``eval/rating``: the strength that the policy very likely has, by its ratings."""
        return {"eval/rating": self.league.ratings.of(POLICY).low}

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step that was recorded last."""
        return self._metrics


def _is_snapshot(name: str) -> bool:
    return name != POLICY and not is_fixed(name)


def snapshots_of(state: Mapping[str, Any]) -> set[str]:
    """Return the names of the snapshots that a checkpoint's state needs."""
    found = state.get("source", {}).get("self_play", {}).get("snapshots", ())
    return {snapshot_name(int(step)) for step in found}
