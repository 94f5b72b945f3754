"""Runs the groups of a training run, with and without staleness."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

from agentrl.config.schema import Config
from agentrl.core.errors import RunStopped
from agentrl.core.types import Rollout
from agentrl.data.jobs import Job
from agentrl.episode.runner import EpisodeRunner
from agentrl.obs.waiting import waiting
from agentrl.self_play.training import SelfPlay
from agentrl.train.pipeline.admission import Admission
from agentrl.train.pipeline.filtering import Filtering
from agentrl.train.pipeline.groups import run_group
from agentrl.train.pipeline.journal import Journal
from agentrl.train.pipeline.length_bias import LengthBias
from agentrl.train.pipeline.staleness import mask_stale, staleness_metrics
from agentrl.train.rollout_source import Consumer, TaskPosition


@dataclass(frozen=True, slots=True)
class Taken:
    """The groups of a training step, and those that were filtered since the step before."""

    positions: list[int]
    """Of the tasks that the step trains, ascending."""
    filtered_positions: list[int]
    """Of those that were filtered."""
    rollouts: list[Rollout]
    """To train on, in the order of positions and samples."""
    filtered: list[Rollout]
    """Those of filtered groups."""


class RunningEpisodes:
    """How many episodes run, and their mean over time."""

    def __init__(self) -> None:
        self.now = 0
        self._began = self._since = asyncio.get_running_loop().time()
        self._episode_s = 0.0

    def add(self, change: int) -> None:
        """Record that so many more episodes run."""
        clock = asyncio.get_running_loop().time()
        self._episode_s += self.now * (clock - self._since)
        self._since, self.now = clock, self.now + change

    def mean(self) -> float:
        """Return the mean number since the last call."""
        self.add(0)
        found = self._episode_s / max(self._since - self._began, 1e-9)
        self._began, self._episode_s = self._since, 0.0
        return found


@dataclass(slots=True)
class GroupScheduler:
    """Runs the groups that `Admission` admits.

    With ``async.max_staleness`` they run while the learner trains. Without it they begin when `take` is called, after the
    weight sync, and all of them have ended when it returns: nothing runs between two steps.

    What ends the run, such as a signal, a dead server or the failure policy, cancels all episodes and is raised by `take`.
    """

    admission: Admission
    runner: EpisodeRunner
    jobs_of: Callable[[int], list[Job]]
    """The episodes of the group at a position."""
    concurrency: int
    """With staleness a group begins only if fewer episodes run."""
    watched: Callable[[], AbstractAsyncContextManager[None]]
    """The context in which episodes run; a signal or a dead server ends it."""
    version: int
    """Of the engines' policy."""
    journal: Journal
    """Of the run; it may have groups of an earlier process."""
    filtering: Filtering
    """Drops finished groups, in whose places others begin."""
    on_done: Callable[[Rollout], None] = lambda _: None
    """Called with each rollout when it has its reward."""
    self_play: SelfPlay | None = None
    """Chooses who plays in a group when it is admitted."""
    mask_older_than: int | None = None
    """``async.mask_older_than``."""
    straggler_timeout_s: float = 0.0
    """``rollout.straggler_timeout_s``."""
    _restored: deque[int] = field(default_factory=deque, init=False)
    """Groups that began in an earlier process and that go on, the oldest first."""
    _running: RunningEpisodes = field(default_factory=RunningEpisodes, init=False)
    _results: dict[int, list[Rollout]] = field(default_factory=dict, init=False)
    """Of finished groups by position."""
    _main: asyncio.Task[None] | None = field(default=None, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """A group has finished, or all have ended."""
    _in_order: bool = field(default=False, init=False)
    """The step waits for the groups that began first."""
    _room: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """More groups may begin."""
    _taken: float = field(default_factory=lambda: asyncio.get_running_loop().time(), init=False)
    """When sampling began or groups were taken, on the loop's clock."""
    _length_bias: LengthBias = field(default_factory=LengthBias, init=False)
    _metrics: dict[str, float] = field(default_factory=dict, init=False)
    """Of the groups that were taken last."""

    @classmethod
    def of_run(
        cls,
        config: Config,
        position: TaskPosition,
        step: int,
        runner: EpisodeRunner,
        jobs_of: Callable[[int], list[Job]],
        watched: Callable[[], AbstractAsyncContextManager[None]],
        journal: Journal,
        on_done: Callable[[Rollout], None],
        self_play: SelfPlay | None,
    ) -> GroupScheduler:
        """Return the scheduler of a run that has finished ``step`` steps, and whose engines have the policy of that step."""
        untaken = [group for group in journal.untaken if group.position not in position]
        restored = {group.position for group in untaken}
        admission = Admission(
            (each for each in position.untrained() if each not in restored),
            step=step,
            steps=config.train.steps,
            batch_size=config.rollout.batch_size,
            max_staleness=config.asynchronous.max_staleness,
            most=config.rollout.over_sampling_batch_size,
        )
        scheduler = cls(
            admission,
            runner,
            jobs_of,
            config.rollout.concurrency,
            watched,
            step,
            journal,
            Filtering(config.rollout),
            on_done,
            self_play,
            config.asynchronous.mask_older_than,
            config.rollout.straggler_timeout_s,
        )
        for group in untaken:
            if group.dropped:
                scheduler.filtering.restore(group.position, journal.held(group.position), group.dropped)
            else:
                admission.restore(group.position, group.version)
                scheduler._restored.append(group.position)
        return scheduler

    async def take(self, consume: Consumer | None = None) -> Taken:
        """Wait for the groups of the next step, and return them.

        Args:
            consume: called with groups of the step as soon as they have finished and surely belong to it, while others run.

        Raises:
            RunStopped: a signal or the failure policy ends the run.
            AgentrlError: a server died.

        """
        if self.admission.max_staleness:
            positions = await self._finished_groups(consume)
        else:
            self.version, self._taken = self.admission.step, asyncio.get_running_loop().time()
            try:
                positions = await self._finished_groups(consume)
            finally:
                await self.aclose()
        groups = {position: self._results.pop(position) for position in positions}
        filtered = self.filtering.take()
        self._length_bias.add(groups, trained=True)
        self._length_bias.add(filtered, trained=False)
        taken = Taken(positions, [*filtered], _rollouts(groups), _rollouts(filtered))
        self._measure(taken.rollouts, sum(one.sampled_tokens for one in (*taken.rollouts, *taken.filtered)))
        return taken

    async def _finished_groups(self, consume: Consumer | None) -> list[int]:
        """Wait until a step may take groups, and return their positions; the episodes are started if they do not run."""
        if self._main is None:
            self._main = asyncio.create_task(self._run())
            self._main.add_done_callback(lambda _: self._changed.set())
        self._in_order = self.straggler_timeout_s > 0
        limit = asyncio.get_running_loop().call_at(self._taken + self.straggler_timeout_s, self._pass_over)
        with waiting("groups", self._missing):
            while self._main.done() or (positions := self.admission.take(in_order=self._in_order)) is None:
                if self._main.done():
                    self._main.result()
                    raise AssertionError("episodes run until they are closed or raise")
                if consume is not None and (early := self.admission.commit(in_order=self._in_order)):
                    await consume(_rollouts({position: self._results[position] for position in early}))
                    continue
                self._changed.clear()
                await self._changed.wait()
        limit.cancel()
        self._room.set()
        return positions

    def _pass_over(self) -> None:
        """Let the step take groups that began after a straggler."""
        self._in_order = False
        self._changed.set()

    def _measure(self, rollouts: list[Rollout], tokens: int) -> None:
        """Measure the rollouts that were taken, and mask their old tokens; ``tokens`` were sampled, filtered ones included."""
        now, before = asyncio.get_running_loop().time(), self._taken
        self._taken, self._metrics = now, dict(self.filtering.metrics())
        version, limit, stale = self.admission.step - 1, self.mask_older_than, self.admission.max_staleness > 0
        if stale or self._metrics:
            self._metrics |= self._length_bias.metric(self.admission.oldest)
        self._metrics["time/tokens_per_s"] = tokens / max(now - before, 1e-6)
        if stale:
            self._metrics |= staleness_metrics(rollouts, version)
        if limit is not None:
            self._metrics["async/masked_share"] = mask_stale(rollouts, version, limit)

    def note_version(self, version: int) -> None:
        """Record that all engines have the policy ``version``."""
        self.version = version
        self._room.set()

    async def aclose(self) -> None:
        """Cancel all episodes, and wait until they have ended."""
        if self._main is not None:
            self._main.cancel()
            await asyncio.gather(self._main, return_exceptions=True)
            self._main = None

    def metrics(self) -> dict[str, float]:
        """Return metrics of the groups that were taken last, and with staleness of the episodes since the last call."""
        if not self.admission.max_staleness:
            return self._metrics
        found = {
            "async/running_episodes": self._running.mean(),
            "async/finished_groups": float(self.admission.finished),
            "async/passed_over": float(self.admission.passed_over),
        }
        return found | self._metrics

    def _missing(self) -> str:
        positions = self.admission.missing
        return f"of tasks {', '.join(map(str, positions[:8]))}" + (" …" if len(positions) > 8 else "")

    async def _run(self) -> None:
        """Run groups until an error or a cancellation."""
        async with self.watched():
            try:
                async with asyncio.TaskGroup() as group:
                    while True:
                        self._room.clear()
                        await self._admit(group)
                        await self._room.wait()
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None  # the first ended the others

    async def _admit(self, group: asyncio.TaskGroup) -> None:
        """Begin groups, as many as may run."""
        # Without staleness all groups of a step begin with one version: the runner alone limits the episodes.
        while not self.admission.max_staleness or self._running.now < self.concurrency:
            if self._restored:
                position: int | None = self._restored.popleft()
            elif (position := self.admission.admit(self.version)) is not None:
                opponent = "" if self.self_play is None else self.self_play.choose_opponent(position)
                self.journal.admitted(position, self.version, opponent)
            if position is None:
                break
            jobs = await asyncio.to_thread(self.jobs_of, position)  # may read files
            self._running.add(len(jobs))
            group.create_task(self._run_group(position, jobs))

    def _seated(self, position: int, jobs: list[Job]) -> AbstractAsyncContextManager[list[Job]]:
        """Give the body the episodes of a group with their players, unless all of them are over."""
        if self.self_play is None or self.journal.is_finished(position):
            return nullcontext(jobs)
        return self.self_play.assign_players(position, jobs)

    async def _run_group(self, position: int, jobs: list[Job]) -> None:
        def ended() -> None:
            self._running.add(-1)
            self._room.set()

        async with self._seated(position, jobs) as seated:
            rollouts = await run_group(
                self.journal, self.runner, position, seated, on_ended=ended, on_done=self.on_done
            )
        if reason := self.filtering.drop(position, rollouts):
            self.journal.dropped(position, reason)
            self.admission.drop(position)
            self._room.set()
            try:
                self.filtering.check(self.admission.step + 1)
            except RunStopped:
                self.runner.check_dropped(self.filtering.filtered)  # failures are the better reason
                raise
        else:
            self._results[position] = rollouts
            self.admission.finish(position)
        self._changed.set()


def _rollouts(groups: Mapping[int, list[Rollout]]) -> list[Rollout]:
    return [rollout for group in groups.values() for rollout in group]
