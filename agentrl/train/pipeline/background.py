"""Episodes that run in the background, while the learner trains."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from agentrl.config.schema import Config
from agentrl.core.errors import RunStopped
from agentrl.core.types import Rollout
from agentrl.episode.runner import EpisodeRunner, Job
from agentrl.obs.waiting import waiting
from agentrl.train.pipeline.admission import Admission
from agentrl.train.pipeline.filtering import Filtering
from agentrl.train.pipeline.groups import run_group
from agentrl.train.pipeline.journal import Journal
from agentrl.train.pipeline.length_bias import LengthBias
from agentrl.train.pipeline.staleness import mask_stale, staleness_metrics
from agentrl.train.rollout_source import TaskPosition


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
class BackgroundEpisodes:
    """Runs the groups that `Admission` admits.

    What ends the run, such as a signal, a dead server or the failure policy, cancels all episodes and is raised by `take`.
    """

    admission: Admission
    runner: EpisodeRunner
    jobs_of: Callable[[int], list[Job]]
    """The episodes of the group at a position."""
    concurrency: int
    """A group begins only if fewer episodes run."""
    watched: Callable[[], AbstractAsyncContextManager[None]]
    """The context in which episodes run; a signal or a dead server ends it."""
    version: int
    """Of the engines' policy."""
    journal: Journal
    """Of the run; it may have groups of an earlier process."""
    filtering: Filtering
    """Drops finished groups, in whose places others begin."""
    mask_older_than: int | None = None
    """``async.mask_older_than``."""
    _restored: deque[int] = field(default_factory=deque, init=False)
    """Groups that began in an earlier process and that go on, the oldest first."""
    _running: RunningEpisodes = field(default_factory=RunningEpisodes, init=False)
    _results: dict[int, list[Rollout]] = field(default_factory=dict, init=False)
    """Of finished groups by position."""
    _main: asyncio.Task[None] | None = field(default=None, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """A group has finished, or all have ended."""
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
    ) -> BackgroundEpisodes:
        """Return the episodes of a run that has finished ``step`` steps, and whose engines have the policy of that step."""
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
        background = cls(
            admission,
            runner,
            jobs_of,
            config.rollout.concurrency,
            watched,
            step,
            journal,
            Filtering(config.rollout),
            config.asynchronous.mask_older_than,
        )
        for group in untaken:
            if group.dropped:
                background.filtering.restore(group.position, journal.held(group.position), group.dropped)
            else:
                admission.restore(group.position, group.version)
                background._restored.append(group.position)
        return background

    async def take(self) -> Taken:
        """Wait for the groups of the next step, and return them. The first call starts the episodes.

        Raises:
            RunStopped: a signal or the failure policy ends the run.
            AgentrlError: a server died.

        """
        if not self.admission.max_staleness:
            self._taken = asyncio.get_running_loop().time()  # nothing was sampled before
        if self._main is None:
            self._main = asyncio.create_task(self._run())
            self._main.add_done_callback(lambda _: self._changed.set())
        with waiting("groups", self._missing):
            while self._main.done() or (positions := self.admission.take()) is None:
                if self._main.done():
                    self._main.result()
                    raise AssertionError("episodes run until they are closed or raise")
                self._changed.clear()
                await self._changed.wait()
        self._room.set()
        groups = {position: self._results.pop(position) for position in positions}
        filtered = self.filtering.take()
        self._length_bias.add(groups, trained=True)
        self._length_bias.add(filtered, trained=False)
        taken = Taken(positions, [*filtered], _rollouts(groups), _rollouts(filtered))
        self._measure(taken.rollouts, sum(one.sampled_tokens for one in (*taken.rollouts, *taken.filtered)))
        return taken

    def _measure(self, rollouts: list[Rollout], tokens: int) -> None:
        """Measure the rollouts that were taken, and mask their old tokens; ``tokens`` were sampled, filtered ones included."""
        now, before = asyncio.get_running_loop().time(), self._taken
        rate = tokens / max(now - before, 1e-6)
        self._taken, self._metrics = now, {"time/tokens_per_s": rate}
        version, limit = self.admission.step - 1, self.mask_older_than
        self._metrics |= staleness_metrics(rollouts, version) | self.filtering.metrics()
        self._metrics |= self._length_bias.metric(self.admission.oldest)
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

    def metrics(self) -> dict[str, float]:
        """Return metrics of the episodes since the last call, and of the groups that were taken last."""
        found = {
            "async/running_episodes": self._running.mean(),
            "async/finished_groups": float(self.admission.finished),
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
        while self._running.now < self.concurrency:
            if self._restored:
                position: int | None = self._restored.popleft()
            elif (position := self.admission.admit(self.version)) is not None:
                self.journal.admitted(position, self.version)
            if position is None:
                break
            jobs = await asyncio.to_thread(self.jobs_of, position)  # may read files
            self._running.add(len(jobs))
            group.create_task(self._run_group(position, jobs))

    async def _run_group(self, position: int, jobs: list[Job]) -> None:
        def ended() -> None:
            self._running.add(-1)
            self._room.set()

        rollouts = await run_group(self.journal, self.runner, position, jobs, on_ended=ended)
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
