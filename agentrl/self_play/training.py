"""Self-play of a training run: who plays each group, snapshots of the policy, and the league's record."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Container, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl.config.schema import Config
from agentrl.config.self_play import PAST, SelfPlayConfig, is_fixed
from agentrl.core.lineup import Lineup, PolicySeat, Seat
from agentrl.core.sampler import Sampler
from agentrl.core.types import Rollout
from agentrl.data.jobs import Job
from agentrl.episode.seats import agent_roles
from agentrl.inference.client.segments import Vocabulary
from agentrl.inference.fleet.reserved_engines import reserved_fleet
from agentrl.learner.base import LearnerGroup
from agentrl.self_play.game_scores import GameScores, PlayedStrategy
from agentrl.self_play.games import POLICY, Game, games_report
from agentrl.self_play.league import League, LeagueLog
from agentrl.self_play.opponents import Seating, fixed_seat, group_seatings
from agentrl.self_play.snapshots import OpponentEngine, SnapshotEngines, SnapshotFolder
from agentrl.weight_sync.disk import DiskSync

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class SelfPlay:
    """Plays a run's episodes with the opponents of ``self_play``."""

    config: SelfPlayConfig
    league: League
    agents: Sequence[str]
    """Agents of the environment, in the order of seats."""
    tasks: int
    """Groups of a step."""
    snapshots: SnapshotFolder
    engines: SnapshotEngines
    log: LeagueLog
    policies: Mapping[str, str] = field(default_factory=dict)
    """The policy of each agent, in a run of several policies."""
    opponents: dict[int, str] = field(default_factory=dict)
    """Opponents of the groups that were admitted and not trained, by position."""
    _drawn_step: int | None = field(default=None, init=False)
    _drawn: Sequence[str] = field(default=(), init=False)
    """The opponents of the groups that were drawn last, in the order of tasks."""
    _undealt: Sequence[str] = field(default=(), init=False)
    """Those of groups that are not admitted yet."""
    _saved_pool: Sequence[str] = field(default=(), init=False)
    """Snapshots of the pool in the newest checkpoint, which may be incomplete."""
    _evaluated_pool: Sequence[str] = field(default=(), init=False)
    """Snapshots of the pool when the newest evaluation began."""
    metrics: dict[str, float] = field(default_factory=dict, init=False)
    """Metrics of the step that was recorded last."""
    _strategies: dict[str, PlayedStrategy] = field(default_factory=dict, init=False)
    """In a game with a tree, of snapshots by name."""

    def state(self) -> dict[str, Any]:
        """Return the league for a checkpoint, JSON-able."""
        self._saved_pool = self.league.pool.names
        return self.league.state()

    def restore(self, league: Mapping[str, Any] | None, opponents: dict[int, str]) -> None:
        """Resume with the league's state in a checkpoint, if there is one, and with the opponents of untrained groups."""
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
        await self.snapshots.write(learner, step)
        self.league.add_snapshot(step)
        names = {
            *self.league.pool.names,
            *self.opponents.values(),
            *self._undealt,
            *self._evaluated_pool,
            *self._saved_pool,
        }
        # An engine that is started again loads what it held.
        names.update(engine.snapshot for engine in self.engines.engines if engine.snapshot is not None)
        await asyncio.to_thread(self.snapshots.remove_all_except, names)

    def choose_opponent(self, position: int) -> str:
        """Return the opponent of the group at a position, which is admitted now; the group keeps it.

        The opponents of `tasks` groups are drawn together, when the first of them is admitted.
        """
        step, task = divmod(position, self.tasks)
        if self._drawn_step != step:
            self._drawn_step, self._drawn = step, self.league.opponents(step + 1, self.tasks)
        self.opponents[position], self._undealt = self._drawn[task], self._drawn[task + 1 :]
        return self._drawn[task]

    @asynccontextmanager
    async def assign_players(self, position: int, jobs: Sequence[Job]) -> AsyncIterator[list[Job]]:
        """Give the body the episodes of a group with their lineups, once an engine holds the snapshot that plays.

        Raises:
            EngineError: the engine does not load the snapshot.
        """
        opponent, task = self.opponents[position], position % self.tasks
        seatings = group_seatings(self.config, opponent, task=task, seats=len(self.agents), samples=len(jobs))
        async with AsyncExitStack() as exits:
            sampler = None
            if opponent != POLICY and not is_fixed(opponent):
                fleet = await exits.enter_async_context(self.engines.engine_with(opponent, self._drawn))
                sampler = fleet.sampler
            yield [
                replace(job, lineup=self._lineup(seating, sampler)) for job, seating in zip(jobs, seatings, strict=True)
            ]

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
        played = [
            rollout for rollout in rollouts if rollout.failure is None and (rollout.filtered or not rollout.dropped)
        ]
        games = {
            rollout.episode: Game(rollout.episode, players_by_seat(rollout), rollout.seat_rewards) for rollout in played
        }
        self.metrics, warnings = self.league.record(list(games.values()), played)
        for text in warnings:
            _log.warning("step %d: %s", step, text)
        self.log.write(step, self.league)

    def on_evaluated(self, step: int, rollouts_by_set: Mapping[str, Sequence[Rollout]]) -> None:
        """Write the results of an evaluation: the rollouts of each set with opponents, by its full name."""
        if rollouts_by_set:
            reports = {name: games_report(rollouts) for name, rollouts in rollouts_by_set.items()}
            self.log.write_evaluation(step, reports)

    def begin_evaluation(self) -> dict[str, float]:
        """Keep the pool of this moment for `pool_metrics`, and return ``eval/rating``.

        It is the strength that the policy very likely has, by its ratings.
        """
        self._evaluated_pool = self.league.pool.names
        return {"eval/rating": self.league.ratings.rating(POLICY).low}

    async def pool_metrics(self, scores: GameScores) -> dict[str, float]:
        """Return the exploitability of the pool at the begin of the evaluation. A new snapshot is loaded into an engine first.

        Raises:
            EngineError: an engine does not load it, or fails.
        """
        names = self._evaluated_pool
        for name in names if self.engines.engines else ():
            if name not in self._strategies:
                async with self.engines.engine_with(name) as fleet:
                    self._strategies[name] = await scores.score_strategy(fleet)
        self._strategies = {name: self._strategies[name] for name in names if name in self._strategies}
        self._evaluated_pool = ()
        return scores.pool_metrics(list(self._strategies.values()))


async def open_self_play(
    config: Config,
    folder: Path,
    model: Path,
    vocabulary: Vocabulary,
    exits: AsyncExitStack,
    dtype: str | None,
    resume_after: int | None,
) -> SelfPlay | None:
    """Start the engines that play snapshots and return the self-play of a training run; None without ``self_play``.

    Args:
        config: of the run.
        folder: of the run.
        model: folder of the weights that the engines start with.
        vocabulary: of the policy.
        exits: gets what ends the engines.
        dtype: of the written weights; None: the learner's.
        resume_after: lines of the league's log after this step are removed; None removes all.

    Raises:
        EngineError: an engine does not start.
    """
    if config.self_play is None:
        return None
    roles = agent_roles(config)
    fleets = []
    for number in range(config.self_play.snapshot_engines):
        logs = folder / "logs" / f"opponent-{number}"
        fleets.append(reserved_fleet(config, model, logs, number, vocabulary))
        exits.push_async_callback(fleets[-1].aclose)
    await asyncio.gather(*(fleet.start() for fleet in fleets))
    lora = config.learner.lora if config.weights.adapters == "only" else None
    snapshots = SnapshotFolder(folder, DiskSync.bucket_bytes(config.weights.bucket_mib), dtype, lora)
    lineup = Lineup(policies=config.env.policy_of)
    return SelfPlay(
        config=config.self_play,
        league=League(config.self_play, config.run.seed),
        agents=list(roles),
        tasks=config.rollout.batch_size,
        snapshots=snapshots,
        engines=SnapshotEngines([OpponentEngine(fleet, snapshots) for fleet in fleets]),
        log=LeagueLog(folder, resume_after),
        policies={agent: lineup.policy(agent, role) for agent, role in roles.items()},
    )


def players_by_seat(rollout: Rollout) -> tuple[str, ...]:
    """Return who played in the episode of a rollout, by seat: `POLICY`, a snapshot's name, or a fixed opponent."""
    past = rollout.opponent == PAST
    return tuple(POLICY if seat.trained else seat.player if past else rollout.opponent for seat in rollout.seats)
