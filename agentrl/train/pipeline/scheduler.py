"""Runs the groups of a training run: while the learner trains, or only while a step waits for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar

from typing_extensions import override

from agentrl.batch.provenance import check_graded
from agentrl.config.rollout import RolloutConfig
from agentrl.config.schema import Config
from agentrl.core.errors import RunStopped
from agentrl.core.types import Rollout
from agentrl.data.jobs import Job
from agentrl.episode.runner import GroupRunner
from agentrl.obs.journal import JournaledGroup
from agentrl.obs.waiting import waiting
from agentrl.self_play.training import SelfPlay
from agentrl.train.pipeline.filtering import Filtering, LengthBias
from agentrl.train.pipeline.journal import Journal
from agentrl.train.pipeline.staleness_bound import Admission
from agentrl.train.pipeline.token_ages import mask_stale, staleness_metrics
from agentrl.train.rollout_source import Consumer, TaskPosition


@dataclass(frozen=True, slots=True)
class StepGroups:
    """The groups of a training step, and those that were filtered since the step before."""

    positions: list[int]
    """Positions of the tasks that the step trains, ascending."""
    filtered_positions: list[int]
    """Positions of those that were filtered."""
    rollouts: list[Rollout]
    """To train on, in the order of positions and samples."""
    filtered: list[Rollout]
    """Those of filtered groups."""


class RunningEpisodes:
    """How many episodes run, and their mean over time."""

    def __init__(self) -> None:
        self.count = 0
        self._began = self._since = asyncio.get_running_loop().time()
        self._episode_s = 0.0

    def add(self, change: int) -> None:
        """Record that so many more episodes run."""
        clock = asyncio.get_running_loop().time()
        self._episode_s += self.count * (clock - self._since)
        self._since, self.count = clock, self.count + change

    def mean(self) -> float:
        """Return the mean number since the last call."""
        self.add(0)
        mean = self._episode_s / max(self._since - self._began, 1e-9)
        self._began, self._episode_s = self._since, 0.0
        return mean


@dataclass(slots=True)
class GroupScheduler:
    """Runs the groups that `Admission` admits, while the learner trains (``async.max_staleness``).

    What ends the run, such as a signal, a dead server or the failure policy, cancels all episodes and is raised by `take`.
    """

    overlaps_training: ClassVar[bool] = True
    """Whether groups run between two calls of `take`."""
    admission: Admission
    runner: GroupRunner
    group_jobs: Callable[[int], list[Job]]
    """The episodes of the group at a position."""
    guard: Callable[[], AbstractAsyncContextManager[None]]
    """The context in which episodes run; a signal or a dead server ends it."""
    journal: Journal
    """Journal of the run; it may have groups of an earlier process."""
    config: RolloutConfig
    mask_older_than: int | None = None
    """``async.mask_older_than``."""
    on_done: Callable[[Rollout], None] = lambda _: None
    """Called with each rollout when it has its reward."""
    self_play: SelfPlay | None = None
    """Chooses who plays in a group when it is admitted."""
    version: int = field(init=False)
    """Version of the engines' policy."""
    filtering: Filtering = field(init=False)
    """Drops finished groups, in whose places others begin."""
    _restored: deque[int] = field(default_factory=deque, init=False)
    """Groups that began in an earlier process and are resumed, the oldest first."""
    _running: RunningEpisodes = field(default_factory=RunningEpisodes, init=False)
    _results: dict[int, list[Rollout]] = field(default_factory=dict, init=False)
    """Rollouts of finished groups by position."""
    _main: asyncio.Task[None] | None = field(default=None, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """A group has finished, or all have ended."""
    _in_order: bool = field(default=False, init=False)
    """The step waits for the groups that began first."""
    _may_begin: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """More groups may begin."""
    _last_take: float = field(default_factory=lambda: asyncio.get_running_loop().time(), init=False)
    """When sampling began or groups were taken, on the loop's clock."""
    _length_bias: LengthBias = field(default_factory=LengthBias, init=False)
    _metrics: dict[str, float] = field(default_factory=dict, init=False)
    """Metrics of the groups that were taken last."""

    def __post_init__(self) -> None:
        """Begin with the policy of the last finished step."""
        self.version = self.admission.step
        self.filtering = Filtering(self.config)

    def restore(self, groups: Sequence[JournaledGroup]) -> None:
        """Resume groups of an earlier process that no step has trained, the oldest first."""
        for group in groups:
            if group.dropped:
                self.filtering.restore(group.position, self.journal.read_group(group.position), group.dropped)
            else:
                self.admission.restore(group.position, group.version)
                self._restored.append(group.position)

    async def take(self, consume: Consumer | None = None) -> StepGroups | None:
        """Wait for the groups of the next step, and return them; None if the tasks that are left do not fill its batch.

        Args:
            consume: called with groups of the step as soon as they have finished and surely belong to it, while others run.

        Raises:
            RunStopped: a signal or the failure policy ends the run.
            AgentrlError: a server died.
        """
        async with self._running_episodes():
            positions = await self._finished_groups(consume)
        if positions is None:
            return None
        groups = {position: self._results.pop(position) for position in positions}
        filtered = self.filtering.take()
        self._length_bias.add(groups, trained=True)
        self._length_bias.add(filtered, trained=False)
        step_groups = StepGroups(
            positions,
            [*filtered],
            [rollout for group in groups.values() for rollout in group],
            [rollout for group in filtered.values() for rollout in group],
        )
        rollouts = (*step_groups.rollouts, *step_groups.filtered)
        self.runner.check_dropped(rollouts)
        await self._measure(step_groups.rollouts, sum(rollout.sampled_tokens for rollout in rollouts))
        return step_groups

    @asynccontextmanager
    async def _running_episodes(self) -> AsyncIterator[None]:
        """Let episodes run in the body; these also run after it."""
        yield

    async def _finished_groups(self, consume: Consumer | None) -> list[int] | None:
        """Wait until a step may take groups, and return their positions; the episodes are started if they do not run.

        Returns:
            None if the tasks that are left do not fill a batch.
        """
        if self._main is None:
            self._main = asyncio.create_task(self._run())
            self._main.add_done_callback(lambda _: self._changed.set())
        timeout_s = self.config.straggler_timeout_s
        self._in_order = timeout_s > 0
        limit = asyncio.get_running_loop().call_at(self._last_take + timeout_s, self._pass_over)
        with waiting("groups", self._describe_unfinished):
            while self._main.done() or (positions := self.admission.take(in_order=self._in_order)) is None:
                if self._main.done():
                    self._main.result()
                    raise AssertionError("episodes run until they are closed or raise")
                if self.admission.is_exhausted:
                    break
                if consume is not None and (early := self.admission.commit(in_order=self._in_order)):
                    await consume([rollout for position in early for rollout in self._results[position]])
                    continue
                self._changed.clear()
                await self._changed.wait()
        limit.cancel()
        self._may_begin.set()
        return positions

    def _pass_over(self) -> None:
        """Let the step take groups that began after a straggler."""
        self._in_order = False
        self._changed.set()

    async def _measure(self, rollouts: list[Rollout], tokens: int) -> None:
        """Measure the rollouts that were taken, and mask their old tokens; ``tokens`` were sampled, filtered ones included."""
        clock, last_take = asyncio.get_running_loop().time(), self._last_take
        self._last_take, version = clock, self.admission.step - 1
        self._metrics = self.filtering.metrics | self._length_metrics()
        self._metrics["time/tokens_per_s"] = tokens / max(clock - last_take, 1e-6)
        self._metrics |= await asyncio.to_thread(self._age_metrics, rollouts, version)
        if self.mask_older_than is not None:
            masked_share = await asyncio.to_thread(mask_stale, rollouts, version, self.mask_older_than)
            self._metrics["async/masked_share"] = masked_share

    def _length_metrics(self) -> dict[str, float]:
        return self._length_bias.metric(self.admission.oldest)

    def _age_metrics(self, rollouts: list[Rollout], version: int) -> dict[str, float]:
        return staleness_metrics(rollouts, version)

    def set_version(self, version: int) -> None:
        """Record that all engines have the policy ``version``."""
        self.version = version
        self._may_begin.set()

    async def aclose(self) -> None:
        """Cancel all episodes, and wait until they have ended."""
        if self._main is not None:
            self._main.cancel()
            await asyncio.gather(self._main, return_exceptions=True)
            self._main = None

    def metrics(self) -> dict[str, float]:
        """Return metrics of the groups that were taken last, and of the episodes since the last call."""
        return {
            "async/running_episodes": self._running.mean(),
            "async/finished_groups": float(self.admission.finished),
            "async/passed_over": float(self.admission.passed_over),
            **self._metrics,
        }

    def _describe_unfinished(self) -> str:
        positions = self.admission.unfinished
        return f"of tasks {', '.join(map(str, positions[:8]))}" + (" …" if len(positions) > 8 else "")

    async def _run(self) -> None:
        """Run groups until an error or a cancellation."""
        async with self.guard():
            try:
                async with asyncio.TaskGroup() as group:
                    while True:
                        self._may_begin.clear()
                        await self._admit(group)
                        await self._may_begin.wait()
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None  # the first ended the others

    async def _admit(self, group: asyncio.TaskGroup) -> None:
        """Begin groups, as many as may run."""
        while self._has_room():
            if self._restored:
                position: int | None = self._restored.popleft()
            elif (position := self.admission.admit(self.version)) is not None:
                opponent = "" if self.self_play is None else self.self_play.choose_opponent(position)
                self.journal.record_admitted(position, self.version, opponent)
            if position is None:
                break
            jobs = await asyncio.to_thread(self.group_jobs, position)  # may read files
            self._running.add(len(jobs))
            group.create_task(self._run_group(position, jobs))

    def _has_room(self) -> bool:
        """Whether another group may begin, as fewer episodes run than ``rollout.concurrency``."""
        return self._running.count < self.config.concurrency

    def _assign_players(self, position: int, jobs: list[Job]) -> AbstractAsyncContextManager[list[Job]]:
        """Give the body the episodes of a group with their players, unless all of them are over."""
        if self.self_play is None or self.journal.is_finished(position):
            return nullcontext(jobs)
        return self.self_play.assign_players(position, jobs)

    async def _run_group(self, position: int, jobs: list[Job]) -> None:
        """Run the episodes of a group that the journal does not have, and keep the rollouts of all until a step takes them."""

        def end_episode() -> None:
            self._running.add(-1)
            self._may_begin.set()

        def finish_episode(rollout: Rollout) -> None:
            if self.runner.has_single_rollouts:
                self.journal.record_ended(position, rollout)
            self.on_done(rollout)

        async with self._assign_players(position, jobs) as jobs:
            rollouts = await asyncio.to_thread(self.journal.read_group, position)
            is_finished, single = self.journal.is_finished(position), self.runner.has_single_rollouts
            if not is_finished and not (single and {rollout.prompt_id for rollout in rollouts} == {jobs[0].task.id}):
                rollouts = []
            journaled = {rollout.rollout_id: rollout for rollout in rollouts}
            remaining = [] if is_finished else [job for job in jobs if job.rollout_id not in journaled]
            for rollout in rollouts:
                self.on_done(rollout)
            for _ in range(len(jobs) - len(remaining)):
                end_episode()
            if not is_finished:
                saved = self.journal.episodes.group_states(position) if single else None
                rollouts = await self.runner.run_many(
                    remaining, finish_episode, on_ended=end_episode, check_dropped=False, saved=saved
                )
                if journaled:
                    by_id = journaled | {rollout.rollout_id: rollout for rollout in rollouts}
                    rollouts = [by_id[job.rollout_id] for job in jobs]
                check_graded(rollouts)  # a resumed run trains what the journal has
                await self.journal.record_finished(position, rollouts)
        if reason := self.filtering.drop(position, rollouts):
            self.journal.record_dropped(position, reason)
            self.admission.drop(position)
            self._may_begin.set()
            try:
                self.filtering.check(self.admission.step + 1)
            except RunStopped:
                self.runner.check_dropped(self.filtering.filtered)  # failures are the better reason
                raise
        else:
            self._results[position] = rollouts
            self.admission.finish(position)
        self._changed.set()


class SynchronousScheduler(GroupScheduler):
    """Begins the groups of a step when `take` is called, after the weight sync. All have ended when it returns."""

    overlaps_training = False

    @override
    @asynccontextmanager
    async def _running_episodes(self) -> AsyncIterator[None]:
        self.version, self._last_take = self.admission.step, asyncio.get_running_loop().time()
        try:
            yield
        finally:
            await self.aclose()

    @override
    def metrics(self) -> dict[str, float]:
        return self._metrics

    @override
    def _has_room(self) -> bool:
        return True  # all groups of a step begin with one version: the runner alone limits the episodes

    @override
    def _length_metrics(self) -> dict[str, float]:
        return super()._length_metrics() if self.filtering.metrics else {}

    @override
    def _age_metrics(self, rollouts: list[Rollout], version: int) -> dict[str, float]:
        return {}


def open_scheduler(  # everything that the scheduler of a run needs
    config: Config,
    step: int,
    position: TaskPosition,
    journal: Journal,
    *,
    runner: GroupRunner,
    group_jobs: Callable[[int], list[Job]],
    guard: Callable[[], AbstractAsyncContextManager[None]],
    on_done: Callable[[Rollout], None],
    self_play: SelfPlay | None,
    has_task: Callable[[int], bool] = lambda _: True,
) -> GroupScheduler:
    """Return the scheduler of a run that has finished ``step`` steps, and whose engines have the policy of that step.

    The tasks before ``position`` were trained. ``config`` has the number of steps. See `GroupScheduler` and `Admission` for the
    other arguments.
    """
    assert config.train.steps is not None, "the number of steps was computed from train.epochs"
    rollout, asynchronous = config.rollout, config.asynchronous
    pending = [group for group in journal.pending if group.position not in position]
    pending_positions = {group.position for group in pending}
    admission = Admission(
        (number for number in position.untrained_positions() if number not in pending_positions),
        step=step,
        steps=config.train.steps,
        batch_size=rollout.batch_size,
        max_staleness=asynchronous.max_staleness,
        most=rollout.over_sampling_batch_size,
        has_task=has_task,
    )
    scheduler_type = GroupScheduler if asynchronous.max_staleness else SynchronousScheduler
    scheduler = scheduler_type(
        admission,
        runner,
        group_jobs,
        guard,
        journal,
        rollout,
        asynchronous.mask_older_than,
        on_done,
        self_play,
    )
    scheduler.restore(pending)
    return scheduler
