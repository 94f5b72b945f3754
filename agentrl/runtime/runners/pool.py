"""The pool of a run's runner processes: divides groups among them, and begins lost episodes again."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from agentrl.config.schema import Config
from agentrl.config.toolserver import ToolConfig
from agentrl.core.errors import ConfigError, RunnerError, RunStopped
from agentrl.core.types import Failure, FailureKind, Rollout, StopReason, json_state
from agentrl.data.jobs import Job
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.runner import GroupRunner, SamplingChange
from agentrl.episode.state import SavedStates
from agentrl.inference.client.engine_state import FleetUpdate
from agentrl.inference.fleet.fleet import Fleet
from agentrl.inference.fleet.router import RoutedSampler
from agentrl.obs.records import decode_record
from agentrl.obs.waiting import WaitRegistry, current_wait, waiting
from agentrl.runtime.runners.messages import (
    CancelGroup,
    EpisodeEnded,
    FleetDemand,
    FromRunner,
    GroupEnded,
    Pulse,
    RolloutDone,
    RunGroup,
    Setup,
)
from agentrl.runtime.runners.runner import RemoteRunners, RunnerProcess

_log = logging.getLogger(__name__)

_LARGE_RECORD = 1 << 16
"""Bytes of a record from which it is decoded in a thread, so that it does not hold up the event loop."""
_CANCEL_S = 10.0
"""Seconds that a runner may take to cancel a group."""


@dataclass(slots=True, eq=False)
class RunnerGroup:
    """Episodes of one task, which run in one process."""

    jobs: Sequence[Job]
    fleet: int
    sampling: SamplingChange | None
    saved: SavedStates | None
    on_done: Callable[[Rollout], None]
    on_ended: Callable[[], None]
    single: bool
    """Whether each episode is one rollout with the id of its job: those of a runner that is lost are kept."""
    result: asyncio.Future[list[Rollout]]
    wait: waiting | WaitRegistry | None
    """In which it runs."""
    runner: RunnerProcess | None = None
    """That has it; None: it waits for one."""
    finished: dict[str, Rollout] = field(default_factory=dict)
    """Rollouts of earlier processes, by job."""
    running: Sequence[Job] = ()
    """The jobs that the runner has."""
    received: list[Rollout] = field(default_factory=list)
    """From it."""
    ended: int = 0
    """Episodes that have ended at it."""
    reported: int = 0
    """Episodes whose end was reported by ``on_ended``."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """No runner has it any more."""
    losses: Counter[str] = field(default_factory=Counter)
    """How often a job's runner was lost, by `Job.rollout_id`."""

    def describe(self) -> str:
        """Return where it runs, in words."""
        where = "any" if self.runner is None else self.runner.describe()
        return f"{where}, with the group of task {self.jobs[0].task.id}"

    def report_ended(self) -> None:
        """Report ends of episodes that were not reported."""
        while len(self.finished) + self.ended > self.reported:
            self.reported += 1
            self.on_ended()

    def add(self, rollout: Rollout) -> None:
        """Take a rollout of the runner."""
        self.received.append(rollout)
        if self.single:
            self.on_done(rollout)

    def finish(self, order: Sequence[int]) -> None:
        """Take the end of the group; ``order`` has the places of its rollouts among those received."""
        rollouts = [self.received[number] for number in order]
        if self.single:
            by_id = self.finished | {rollout.rollout_id: rollout for rollout in rollouts}
            rollouts = [by_id[job.rollout_id] for job in self.jobs]
        else:
            rollouts += self.finished.values()
            for rollout in rollouts:
                self.on_done(rollout)
        self.result.set_result(rollouts)

    def keep_finished(self) -> list[Job]:
        """Keep the rollouts of a runner that is lost, if they are whole, and return the jobs that were lost with it."""
        if self.single:
            self.finished |= {rollout.rollout_id: rollout for rollout in self.received}
        self.received, self.ended, self.runner = [], 0, None
        return [job for job in self.running if job.rollout_id not in self.finished]


class RunnerPool:
    """Runs groups in processes, which are started again if they die.

    Args:
        config: of the run.
        runners: processes.
        model: folder of the tokenizer.
        logs: folder of the processes' logs.
        fleets: returns all fleets: that of the run, those of frozen roles, then others. New ones are at the end.
        remote: starts the processes; None: on this machine.
    """

    def __init__(
        self,
        config: Config,
        runners: int,
        model: Path,
        logs: Path,
        fleets: Callable[[], Sequence[Fleet]],
        remote: RemoteRunners | None = None,
    ) -> None:
        self.single = True
        """Whether each episode is one rollout, with the id of its job."""
        self.failure = FailurePolicy(config.rollout.failure)
        self.restarts = 0
        """Restarts of all processes."""
        self._config, self._model, self._fleets = config, model.absolute(), fleets
        self._runners = [
            RunnerProcess(number, logs.absolute(), self._fleet_number, self._receive, self._outer_wait, remote)
            for number in range(runners)
        ]
        self._connected = 0
        """Fleets whose engines the runners have."""
        self._waiting: deque[RunnerGroup] = deque()
        self._groups: dict[int, RunnerGroup] = {}
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._error: BaseException | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids of the processes."""
        return [runner.pid for runner in self._runners]

    async def spawn(self) -> None:
        """Start the processes, which then wait for `start`."""
        await asyncio.gather(*(runner.spawn() for runner in self._runners))

    async def start(self, tool_urls: Mapping[str, str], *, single: bool) -> None:
        """Set the processes up, and supervise them.

        Args:
            tool_urls: addresses of the run's tool servers by the tool's name.
            single: see `single`.

        Raises:
            RunnerError: one does not start; the message has its last log lines.
        """
        self.single = single
        tools = self._config.tools
        with_urls = {
            name: tools.get(name, ToolConfig()).model_copy(update={"url": url}) for name, url in tool_urls.items()
        }
        self._config = self._config.model_copy(update={"tools": {**tools, **with_urls}})
        self._connect()
        await asyncio.gather(*(self._begin(runner) for runner in self._runners))
        self._tasks = [
            asyncio.create_task(self._supervise(runner), name=f"runner {runner.number}") for runner in self._runners
        ]

    def runner(self, fleet: Fleet) -> PooledRunner:
        """Return a runner whose episodes a fleet samples, with the sampling parameters of training."""
        return PooledRunner(self, self._fleet_number(fleet.sampler))

    def check(self) -> None:
        """Kill processes that hang.

        Raises:
            RunnerError: one died more often than it may.
        """
        if self._error is not None:
            raise self._error
        timeout_s = self._config.rollout.runner_timeout_s
        for runner in self._runners:
            if runner.ready and time.monotonic() - runner.heard_at > timeout_s:
                runner.heard_at = time.monotonic()
                _log.warning(
                    "runner %d was silent for rollout.runner_timeout_s=%g s: killing it", runner.number, timeout_s
                )
                runner.kill()

    async def aclose(self) -> None:
        """Cancel all episodes and end the processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(runner.aclose() for runner in self._runners))

    # Groups

    def _outer_wait(self, number: int) -> waiting | WaitRegistry | None:
        return self._groups[number].wait

    def submit(self, group: RunnerGroup) -> None:
        """Run a group as soon as a process has room for it."""
        if self._error is not None:
            group.result.set_exception(self._error)
            return
        group.running = group.jobs
        self._waiting.append(group)
        self._dispatch()

    async def cancel(self, group: RunnerGroup) -> None:
        """Cancel a group, and wait until none of its episodes runs."""
        group.result.cancel()
        if group in self._waiting:
            self._waiting.remove(group)
        for number in [number for number, given_group in self._groups.items() if given_group is group]:
            assert group.runner is not None, "a runner has it"
            group.runner.send(CancelGroup(number))
            with suppress(TimeoutError):
                await asyncio.wait_for(group.gone.wait(), _CANCEL_S)

    def _dispatch(self) -> None:
        """Give waiting groups to the processes with the fewest episodes, as far as these have room.

        A group whose next loss is its last gets a process alone: what kills processes takes no other group with it then.
        """
        while self._waiting:
            shared = (runner for runner in self._runners if runner.ready and not runner.has_last_try)
            runner = min(shared, key=lambda runner: runner.running, default=None)
            is_last_try = self._is_last_try(self._waiting[0])
            if runner is None or runner.running >= (1 if is_last_try else self._share(runner.number)):
                return
            runner.has_last_try = is_last_try
            self._give(self._waiting.popleft(), runner)

    def _is_last_try(self, group: RunnerGroup) -> bool:
        """Return whether the failure policy drops an episode of a group when it is lost once more."""
        losses = max((group.losses[job.rollout_id] for job in group.running), default=0)
        return losses > 0 and losses >= self.failure.config.max_retries

    def _give(self, group: RunnerGroup, runner: RunnerProcess) -> None:
        self._connect()
        number = next(self._numbers)
        try:
            runner.send(RunGroup(number, group.running, group.fleet, group.sampling, group.saved))
        except Exception as error:
            task = group.jobs[0].task
            group.result.set_exception(
                ConfigError(
                    f"the episodes of task {task.id!r} cannot be sent to a runner process: {type(error).__name__}: {error}; set "
                    "rollout.runners=0"
                )
            )
            return
        group.runner = runner
        runner.running += len(group.running)
        self._groups[number] = group

    def _share(self, number: int) -> int:
        """Return how many episodes a process may run."""
        return (self._config.rollout.concurrency + number) // len(self._runners)

    async def _receive(self, runner: RunnerProcess, message: FromRunner) -> None:
        match message:
            case EpisodeEnded(number):
                runner.running -= 1
                self._groups[number].ended += 1
                self._groups[number].report_ended()
            case RolloutDone(number, record):
                large = len(record) > _LARGE_RECORD
                rollout = await asyncio.to_thread(decode_record, record) if large else decode_record(record)
                rollout.record = record
                if not (group := self._groups[number]).result.done():
                    group.add(rollout)
            case GroupEnded(number, order, error):
                group = self._groups.pop(number)
                group.gone.set()
                runner.running -= len(group.running) - group.ended
                runner.has_last_try = False  # or it had none
                if group.result.done():
                    pass
                elif error is not None:
                    group.result.set_exception(error)
                else:
                    group.finish(order)
            case FleetDemand(number, has_requests):
                self._fleets()[number].mirror.set_demand(runner.number, has_requests)
            case Pulse():
                self._add_counts(runner.last_pulse, message)
            case _:
                raise AssertionError(f"a runner sends no {type(message).__name__}")
        self._dispatch()

    def _add_counts(self, last: Pulse, pulse: Pulse) -> None:
        """Add what a runner has counted since its last pulse to the counts of the fleets."""
        for number, fleet in enumerate(self._fleets()[: len(pulse.counts)]):
            counted = number < len(last.counts)
            fleet.sampler.counts.update(pulse.counts[number])
            fleet.sampler.counts.subtract(last.counts[number] if counted else {})
            fleet.mirror.discarded_tokens += pulse.discarded_tokens[number] - (
                last.discarded_tokens[number] if counted else 0
            )
            fleet.mirror.add_block_uses(pulse.block_uses[number])

    # Processes

    async def _supervise(self, runner: RunnerProcess) -> None:
        """Serve a process, and start it again when it has died."""
        try:
            while True:
                how = await runner.serve()
                episodes = runner.running
                self._lose_groups(runner, how)
                await self._start_again(runner, f"{how} with {episodes} episodes, which begin again")
                self._dispatch()
        except Exception as error:
            self._error = self._error or error
            for group in (*self._groups.values(), *self._waiting):
                if not group.result.done():
                    group.result.set_exception(error)

    async def _start_again(self, runner: RunnerProcess, why: str) -> None:
        limit = self._config.rollout.max_runner_restarts
        while not runner.ready:
            if self.restarts >= limit:
                raise RunnerError(f"{why}; rollout.max_runner_restarts={limit} are used up, log: {runner.log}")
            self.restarts += 1
            _log.warning("%s; it is started again (%d of %d), log: %s", why, self.restarts, limit, runner.log)
            try:
                await runner.spawn()
                await self._begin(runner)
            except RunnerError as error:  # it died again
                why = str(error).partition("\n")[0]

    async def _begin(self, runner: RunnerProcess) -> None:
        episodes = self._share(runner.number)

        def updates() -> list[FleetUpdate]:
            return [fleet.mirror.state(runner.number) for fleet in self._fleets()[: self._connected]]

        await runner.begin(Setup(self._config, self._model, episodes, Path.cwd()), updates)

    def _lose_groups(self, runner: RunnerProcess, how: str) -> None:
        """Let the failure policy decide about the episodes of a process that has died."""
        runner.running, runner.has_last_try = 0, False
        for fleet in self._fleets():
            fleet.mirror.set_demand(runner.number, False)
        lost_groups = {number: group for number, group in self._groups.items() if group.runner is runner}
        for number, group in lost_groups.items():
            del self._groups[number]
            group.running = [job for job in group.keep_finished() if self._begins_again(group, job, how)]
            if group.result.done():
                group.gone.set()
            elif group.running:
                self._waiting.appendleft(group)
            else:
                group.finish(())
        self._dispatch()

    def _begins_again(self, group: RunnerGroup, job: Job, how: str) -> bool:
        """Return whether a lost episode begins again; if not, its rollout is a failed one, or the run ends."""
        losses = group.losses[job.rollout_id]
        group.losses[job.rollout_id] += 1
        failure = Failure(FailureKind.RUNNER, RunnerError.__name__, how)
        action = self.failure.decide(failure, losses)
        if action == "retry":
            return True
        if action == "stop" and not group.result.done():
            group.result.set_exception(
                RunStopped(f"episode {job.rollout_id} failed and rollout.failure.runner=stop: {how}")
            )
        rollout = _lost_rollout(job, failure)
        group.finished[job.rollout_id] = rollout
        group.report_ended()
        if group.single:
            group.on_done(rollout)
        return False

    # Fleets

    def _fleet_number(self, sampler: RoutedSampler) -> int:
        numbers = [number for number, fleet in enumerate(self._fleets()) if fleet.sampler is sampler]
        assert numbers, "a sampler of the run's engines"
        return numbers[0]

    def _connect(self) -> None:
        """Let the runners sample with fleets that are new."""
        for number, fleet in enumerate(self._fleets()):
            if number >= self._connected:
                fleet.mirror.connect([partial(runner.update_fleet, number) for runner in self._runners])
                fleet.sampler.on_change()
                self._connected = number + 1


@dataclass(frozen=True, slots=True)
class PooledRunner:
    """Runs episodes in the processes of a pool; implements `agentrl.episode.runner.GroupRunner`."""

    pool: RunnerPool
    fleet: int
    """Number of the fleet that samples."""
    sampling: SamplingChange | None = None

    @property
    def has_single_rollouts(self) -> bool:
        """Whether each episode is one rollout, with the id of its job."""
        return self.pool.single

    def with_sampling(self, change: SamplingChange) -> GroupRunner:
        """Return a runner with these sampling parameters and the same processes."""
        return replace(self, sampling=change)

    async def run_many(
        self,
        jobs: Sequence[Job],
        on_done: Callable[[Rollout], None] | None = None,
        *,
        on_ended: Callable[[], None] = lambda: None,
        check_dropped: bool = True,
        saved: SavedStates | None = None,
    ) -> list[Rollout]:
        """Run all jobs, those of a task, which follow each other, in one process; see `GroupRunner.run_many`."""
        loop = asyncio.get_running_loop()
        groups = [
            RunnerGroup(
                [*task_jobs],
                self.fleet,
                self.sampling,
                saved,
                on_done or (lambda _: None),
                on_ended,
                self.pool.single,
                loop.create_future(),
                current_wait(),
            )
            for _, task_jobs in itertools.groupby(jobs, lambda job: job.task.id)
        ]
        try:
            for group in groups:
                self.pool.submit(group)
            with waiting("runner", lambda: next((group.describe() for group in groups if not group.result.done()), "")):
                results = await asyncio.gather(*(group.result for group in groups))
        except BaseException:
            await asyncio.gather(*(self.pool.cancel(group) for group in groups))
            raise
        rollouts = [rollout for group in results for rollout in group]
        if check_dropped:
            self.pool.failure.check_dropped(rollouts)
        return rollouts

    def check_dropped(self, rollouts: Sequence[Rollout]) -> None:
        """See `FailurePolicy.check_dropped`."""
        self.pool.failure.check_dropped(rollouts)


def _lost_rollout(job: Job, failure: Failure) -> Rollout:
    """Return the rollout of an episode whose runner was lost too often."""
    return Rollout(
        prompt_id=job.task.id,
        rollout_id=job.rollout_id,
        rows=[],
        reward=0.0,
        stop_reason=StopReason.FAILED,
        failure=failure,
        dropped=True,
        metadata=dict(job.task.metadata),
        label=json_state(job.task.answer),
    )
