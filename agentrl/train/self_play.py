"""Self-play in a training run: snapshots of the policy, the engines that play them, and the league's record."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import AsyncIterator, Container, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl.config.learner import LoraConfig
from agentrl.config.self_play import PAST, SelfPlayConfig, is_fixed
from agentrl.core.lineup import Lineup, PolicySeat, Seat
from agentrl.core.sampler import Sampler
from agentrl.core.types import Rollout
from agentrl.data.jobs import Job
from agentrl.evaluation.exploitability import GameScores, PlayedStrategy
from agentrl.evaluation.opponents import fixed_seat, games_report
from agentrl.evaluation.result import SetResult
from agentrl.learner.base import LearnerGroup
from agentrl.learner.checkpoints import STATE, whole_checkpoints
from agentrl.selfplay.games import POLICY, Game
from agentrl.selfplay.league import League
from agentrl.selfplay.league_log import LeagueLog
from agentrl.selfplay.pool import snapshot_name
from agentrl.selfplay.seating import Seating, group_seatings
from agentrl.train.snapshot_engines import SnapshotEngines
from agentrl.weight_sync.adapter import write_adapters
from agentrl.weight_sync.disk import write_weights

_log = logging.getLogger(__name__)
SNAPSHOTS = "snapshots"
"""In the run folder: one folder of weights a snapshot."""


@dataclass(slots=True)
class SelfPlay:
    """Plays a run's episodes with the opponents of ``self_play``."""

    config: SelfPlayConfig
    league: League
    agents: Sequence[str]
    """Of the environment, in the order of seats."""
    tasks: int
    """Groups of a step."""
    folder: Path
    """Of the run."""
    engines: SnapshotEngines
    log: LeagueLog
    bucket_bytes: int
    """Size of a file of weights."""
    dtype: str | None
    """Of the written weights."""
    lora: LoraConfig | None = None
    """With ``weights.adapters=only``: a snapshot has the adapters of each policy."""
    policies: Mapping[str, str] = field(default_factory=dict)
    """The policy of each agent, in such a run."""
    opponents: dict[int, str] = field(default_factory=dict)
    """Of the groups that were admitted and not trained, by position."""
    _drawn_for: int | None = field(default=None, init=False)
    _drawn: Sequence[str] = field(default=(), init=False)
    """The opponents of the groups that were drawn last, in the order of tasks."""
    _scored: Sequence[str] = field(default=(), init=False)
    """Snapshots of the pool when the newest evaluation began."""
    _metrics: dict[str, float] = field(default_factory=dict, init=False)
    _strategies: dict[str, PlayedStrategy] = field(default_factory=dict, init=False)
    """In a game with a tree, of snapshots by name."""

    def restore(self, league: Mapping[str, Any] | None, opponents: dict[int, str]) -> None:
        """Go on with the league's state in a checkpoint, if there is one, and with the opponents of untrained groups."""
        if league is not None:
            self.league.load(league)
        self.opponents = opponents

    async def on_weights(self, learner: LearnerGroup, step: int) -> None:
        """Take a snapshot of the policy after ``step``, if one is due.

        Raises:
            LearnerError, OSError: it cannot be written.

        """
        if PAST not in self.config.mix or not self.league.pool.due(step):
            return
        folder = self.folder / SNAPSHOTS / snapshot_name(step)
        if self.lora is None:
            await write_weights(learner, folder, bucket_bytes=self.bucket_bytes, dtype=self.dtype)
        else:
            await asyncio.to_thread(write_adapters, learner, folder, self.lora, self.dtype)
        self.league.add_snapshot(step)
        needed = {*self.league.pool.names, *self.opponents.values(), *self._scored}
        await asyncio.to_thread(self._remove_others, needed)

    def _remove_others(self, needed: set[str]) -> None:
        """Remove snapshots that are not ``needed``, and that no checkpoint has."""
        for checkpoint in whole_checkpoints(self.folder / "checkpoints"):
            needed |= snapshots_of(json.loads((checkpoint / STATE).read_bytes()))
        for path in (self.folder / SNAPSHOTS).iterdir():
            if path.name not in needed:
                shutil.rmtree(path)

    def choose(self, position: int) -> str:
        """Return the opponent of the group at a position, which is admitted now; the group keeps it.

        The opponents of `tasks` groups are drawn together, when the first of them is admitted.
        """
        step, task = divmod(position, self.tasks)
        if self._drawn_for != step:
            self._drawn_for, self._drawn = step, self.league.opponents(step + 1, self.tasks)
        self.opponents[position] = self._drawn[task]
        return self._drawn[task]

    @asynccontextmanager
    async def seated(self, position: int, jobs: Sequence[Job]) -> AsyncIterator[list[Job]]:
        """Give the body the episodes of a group with their players, once an engine holds the snapshot that plays.

        Raises:
            EngineError: the engine does not load the snapshot.

        """
        opponent, task = self.opponents[position], position % self.tasks
        seatings = group_seatings(self.config, opponent, task=task, seats=len(self.agents), samples=len(jobs))
        async with AsyncExitStack() as exits:
            sampler = None
            if _is_snapshot(opponent):
                sampler = (await exits.enter_async_context(self.engines.holding(opponent, self._drawn))).sampler
            yield [replace(job, lineup=self._lineup(one, sampler)) for job, one in zip(jobs, seatings, strict=True)]

    def _lineup(self, seating: Seating, sampler: Sampler | None) -> Lineup:
        seats: dict[str, Seat] = {}
        lineup = Lineup(seats, seating.opponent, self.policies)
        for agent, player in zip(self.agents, seating.players, strict=True):
            if is_fixed(player):
                seats[agent] = fixed_seat(player, self.config)
            elif player != POLICY:
                seats[agent] = PolicySeat(lineup.policy(agent, ""), trained=False, sampler=sampler, name=player)
        return lineup

    def on_step_trained(self, step: int, consumed: Container[int], rollouts: Sequence[Rollout]) -> None:
        """Record the games of a step.

        Args:
            step: from 1.
            consumed: positions of all groups that were trained so far.
            rollouts: of the step, with those of groups that were filtered: their games count too.

        """
        self.opponents = {position: name for position, name in self.opponents.items() if position not in consumed}
        played = [one for one in rollouts if one.failure is None and (one.filtered or not one.dropped)]
        games = {one.episode: Game(one.episode, players_of(one), one.seat_rewards) for one in played}
        self._metrics, warnings = self.league.record(list(games.values()), played)
        for text in warnings:
            _log.warning("step %d: %s", step, text)
        self.log.write(step, self.league)

    def on_evaluated(self, step: int, results: Sequence[SetResult]) -> None:
        """Write the results of an evaluation with opponents."""
        found = {one.eval_set.full_name: games_report(one.rollouts) for one in results if one.eval_set.lineups}
        if found:
            self.log.write_evaluation(step, found)

    def begin_evaluation(self) -> dict[str, float]:
        """Keep the pool of this moment for `snapshot_strategies`, and return ``eval/rating``.

        It is the strength that the policy very likely has, by its ratings.
        """
        self._scored = self.league.pool.names
        return {"eval/rating": self.league.ratings.of(POLICY).low}

    async def snapshot_strategies(self, scores: GameScores) -> list[PlayedStrategy]:
        """Return how each snapshot plays that the pool had when the evaluation began. A new one is loaded into an engine first.

        Raises:
            EngineError: an engine does not load it, or fails.

        """
        names = self._scored
        for name in names if self.engines.engines else ():
            if name not in self._strategies:
                async with self.engines.holding(name) as fleet:
                    self._strategies[name] = await scores.strategy_of(fleet)
        self._strategies, self._scored = (
            {name: self._strategies[name] for name in names if name in self._strategies},
            (),
        )
        return list(self._strategies.values())

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step that was recorded last."""
        return self._metrics


def _is_snapshot(name: str) -> bool:
    return name != POLICY and not is_fixed(name)


def players_of(rollout: Rollout) -> tuple[str, ...]:
    """Return who played in the episode of a rollout, by seat: `POLICY`, a snapshot's name, or a fixed opponent."""
    past = rollout.opponent == PAST
    return tuple(POLICY if one.trained else one.player if past else rollout.opponent for one in rollout.seats)


def snapshots_of(state: Mapping[str, Any]) -> set[str]:
    """Return the names of the snapshots that a checkpoint's state needs."""
    found = state.get("source", {}).get("self_play", {}).get("snapshots", ())
    return {snapshot_name(int(step)) for step in found}
