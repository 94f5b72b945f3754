"""Runs episodes concurrently and returns them as rollouts, failed ones included."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from agentrl.core.background import DaemonThreads
from agentrl.core.errors import EpisodeError, RunStopped
from agentrl.core.lineup import Lineup
from agentrl.core.task import Task, task_source_name
from agentrl.core.tool import CallTool
from agentrl.core.types import Rollout, StopReason
from agentrl.data.jobs import Job
from agentrl.episode.chat import Agent
from agentrl.episode.context import EpisodeContext
from agentrl.episode.custom_loop import Generate, run_custom_loop
from agentrl.episode.environment_episode import Episode
from agentrl.episode.failure_policy import FailurePolicy, describe_failure
from agentrl.episode.multi_agent_episode import MultiAgentEpisode
from agentrl.episode.participants import SeatProgram
from agentrl.episode.state import EpisodeState, SavedStates
from agentrl.episode.tool_calls import ToolRunner
from agentrl.obs.waiting import waiting
from agentrl.rewards.grader import Grader

_RunningEpisode = tuple[Job, asyncio.Task[list[Rollout]]]
_STARTS = 64
"""Episodes that begin in one iteration of the event loop: the start of thousands must not hold it up for seconds."""


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """How the episodes of one task source run."""

    context: EpisodeContext
    """Environment, renderer, sampler, tools and limits. The runner sets its pool."""
    generate: Generate | None = None
    """Runs the episodes in place of an environment."""
    grader: Grader | None = None
    """Gives the rollouts of `EpisodeRunner.run_many` their reward, except for dropped ones."""
    lineup: Lineup | None = None
    """Who plays, if the environment has several agents; None if it has one."""
    programs: Mapping[str, SeatProgram] = field(default_factory=dict)
    """Programs that play agents of the environment with the policies of their seats, by agent or role."""

    @property
    def grades_groups(self) -> bool:
        """Whether the rollouts of a task are graded in one call."""
        return self.grader is not None and self.grader.group

    @property
    def has_single_rollouts(self) -> bool:
        """Whether each episode is one rollout, with the id of its job."""
        return self.generate is None and self.lineup is None


@dataclass(frozen=True, slots=True)
class SamplingChange:
    """Sampling parameters that replace a runner's. With them engines return neither experts nor sampling support."""

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int | None = None
    """None keeps the runner's limit."""
    ignore_eos: bool = False


class GroupRunner(Protocol):
    """Runs groups of episodes: in this process (`EpisodeRunner`), or in others."""

    @property
    def has_single_rollouts(self) -> bool:
        """Whether each episode is one rollout, with the id of its job."""
        ...

    def with_sampling(self, change: SamplingChange) -> GroupRunner:
        """Return a runner with these sampling parameters, under the same limit of concurrent episodes."""
        ...

    async def run_many(
        self,
        jobs: Sequence[Job],
        on_done: Callable[[Rollout], None] | None = None,
        *,
        on_ended: Callable[[], None] = lambda: None,
        check_dropped: bool = True,
        saved: SavedStates | None = None,
    ) -> list[Rollout]:
        """Run all jobs and return their rollouts in the jobs' order.

        Args:
            jobs: the episodes.
            on_done: called with each rollout once it has its reward.
            on_ended: called when an episode has ended, before it is graded.
            check_dropped: see `check_dropped`, which is called with the rollouts.
            saved: saves episodes of an environment of one agent between turns; they resume from their saved states.

        Raises:
            RunStopped: the failure policy stops the run over one episode or over the number of dropped ones, or the
                grader does.
        """
        ...

    def check_dropped(self, rollouts: Sequence[Rollout]) -> None:
        """See `FailurePolicy.check_dropped`."""
        ...


class EpisodeSlots:
    """The limit on concurrent episodes, and the threads in which synchronous methods of their environments run."""

    def __init__(self, max_concurrency: int) -> None:
        """Let ``max_concurrency`` episodes run at the same time."""
        self.semaphore = asyncio.Semaphore(max_concurrency)
        self.pool = DaemonThreads("env")

    def close(self) -> None:
        """End the threads; a thread in a stuck method of an environment stays until that returns, or the process ends."""
        self.pool.shutdown()


class EpisodeRunner:
    """Runs the episodes of one policy.

    Args:
        settings: how episodes run, by task source; ``""`` in a run with one environment.
        failure: decides what a failed episode becomes.
        slots: limit the concurrent episodes of all sources; several runners may share them.
    """

    def __init__(self, settings: Mapping[str, EpisodeSettings], failure: FailurePolicy, slots: EpisodeSlots) -> None:
        self._by_source = {
            name: replace(source, context=replace(source.context, pool=slots.pool)) for name, source in settings.items()
        }
        self._failure = failure
        self._slots = slots

    def _settings(self, job: Job) -> EpisodeSettings:
        return self._by_source["" if "" in self._by_source else task_source_name(job.task.id)]

    @property
    def has_single_rollouts(self) -> bool:
        """Whether each episode is one rollout, with the id of its job."""
        return all(settings.has_single_rollouts for settings in self._by_source.values())

    def with_sampling(self, change: SamplingChange) -> EpisodeRunner:
        """Return a runner with these sampling parameters and the same slots."""
        by_source = {}
        for name, settings in self._by_source.items():
            context = settings.context
            tokens = change.max_new_tokens or context.limits.max_new_tokens
            sampling = replace(
                context.sampling,
                temperature=change.temperature,
                top_p=change.top_p,
                top_k=change.top_k,
                ignore_eos=change.ignore_eos,
                max_new_tokens=tokens,
                experts_from=None,
                support=None,
            )
            limits = replace(context.limits, max_new_tokens=tokens)
            by_source[name] = replace(settings, context=replace(context, limits=limits, sampling=sampling))
        return EpisodeRunner(by_source, self._failure, self._slots)

    async def run(self, task: Task, seed: int, rollout_id: str) -> list[Rollout]:
        """Run one episode, with retries, and return its rollouts, not graded.

        There is one; all that a generate function returns; or that of each trained agent (see `MultiAgentEpisode.rollouts`).

        Raises:
            RunStopped: the failure policy stops the run over it.
        """
        return await self._run_job(Job(task, seed, rollout_id))

    async def run_many(
        self,
        jobs: Sequence[Job],
        on_done: Callable[[Rollout], None] | None = None,
        *,
        on_ended: Callable[[], None] = lambda: None,
        check_dropped: bool = True,
        saved: SavedStates | None = None,
    ) -> list[Rollout]:
        """Run all jobs; see `GroupRunner.run_many`.

        A grader of single rollouts is called as each episode ends, one of groups when all episodes of a task have ended;
        until then the tool sessions of these episodes stay open. So with a grader of groups a tool server holds up to
        ``rollout.batch_size`` times ``rollout.n_samples_per_prompt`` sessions, and its ``max_sessions`` must allow that
        many. Cancellation aborts every request and closes every session.
        """
        tools: dict[str, ToolRunner] = {}
        try:
            async with asyncio.TaskGroup() as group:
                episodes: list[_RunningEpisode] = []
                for number, job in enumerate(jobs, 1):
                    episodes.append((job, group.create_task(self._run_job(job, tools, saved))))
                    episodes[-1][1].add_done_callback(lambda _: on_ended())
                    if number % _STARTS == 0:
                        await asyncio.sleep(0)
                batches = self._split_by_grading(episodes)
                gradings = [group.create_task(self._grade(batch, tools, on_done)) for batch in batches]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first ended the others
        finally:
            await asyncio.gather(*(runner.close() for runner in tools.values()))
        assert not any(grading.cancelled() for grading in gradings), "a task group drops a child that is cancelled"
        rollouts = [rollout for _, episode in episodes for rollout in episode.result()]
        if check_dropped:
            self.check_dropped(rollouts)
        return rollouts

    async def _run_job(
        self, job: Job, open_tools: dict[str, ToolRunner] | None = None, saved: SavedStates | None = None
    ) -> list[Rollout]:
        """Run one episode, again if the failure policy retries it.

        The tool sessions of its last attempt stay open for grading if there is a grader and ``open_tools``, which then
        gets them by the job's ``rollout_id``.
        """
        settings = self._settings(job)
        context, lineup = settings.context, job.lineup or settings.lineup
        async with self._slots.semaphore:
            saved_state, env_state = _load_saved(job, saved) if settings.has_single_rollouts else (None, None)
            for attempt in itertools.count(0 if saved_state is None else saved_state.attempt):
                state = saved_state or EpisodeState(job.rollout_id, job.seed, attempt, job.reset_seed)
                if settings.generate is not None:
                    agent = Agent(context, job.task, state, lineup)
                    tools, raised = agent.tools, None
                    async with _close_on_error(tools):
                        rollouts = await run_custom_loop(settings.generate, context, agent)
                elif lineup is not None:
                    rollouts, tools, raised = await _play(
                        MultiAgentEpisode(context, job.task, state, lineup, settings.programs)
                    )
                else:
                    episode = Episode(context, job.task, state, env_state, saved=saved)
                    tools, failure, raised = episode.tools, None, None
                    try:
                        async with _close_on_error(tools):
                            reason = await episode.run()
                    except EpisodeError as error:
                        failure, reason, raised = error.as_failure(), StopReason.FAILED, error
                    rollout = episode.conversation.rollout(
                        job.task, reason, seconds=episode.seconds, tool_seconds=tools.seconds, failure=failure
                    )
                    rollouts = [rollout]
                for rollout in rollouts:
                    rollout.graded = settings.grader is None
                rollouts[0].tool_uses = tools.uses
                failure = rollouts[0].failure
                action = self._failure.decide(failure, attempt) if failure is not None else "train"
                if action == "train" and settings.grader is not None and open_tools is not None:
                    open_tools[job.rollout_id] = tools
                    return rollouts
                await tools.close()
                if action == "stop" and failure is not None:
                    raise RunStopped(
                        f"episode {job.rollout_id} failed and rollout.failure.{failure.kind.value}=stop: "
                        f"{describe_failure(failure)}"
                    ) from raised
                if action != "retry":
                    for rollout in rollouts:
                        rollout.dropped = rollout.dropped or action == "drop"
                    return rollouts
                saved_state = env_state = None
                if saved is not None:
                    saved.discard(job.rollout_id)
        raise AssertionError("the loop returns or raises")

    def _split_by_grading(self, episodes: Sequence[_RunningEpisode]) -> list[list[_RunningEpisode]]:
        """Return the episodes in batches that are graded in one call: single ones, or all of a task in the jobs' order."""
        batches: dict[str | int, list[_RunningEpisode]] = {}
        for number, episode in enumerate(episodes):
            job = episode[0]
            key = job.task.id if self._settings(job).grades_groups else number
            batches.setdefault(key, []).append(episode)
        return list(batches.values())

    async def _grade(
        self,
        episodes: Sequence[_RunningEpisode],
        tools: dict[str, ToolRunner],
        on_done: Callable[[Rollout], None] | None,
    ) -> None:
        """Wait for the episodes, grade their rollouts and end their tool sessions."""
        settings = self._settings(episodes[0][0])
        rollouts: list[Rollout] = []
        scoring: dict[str, CallTool] = {}
        for job, episode in episodes:
            job_rollouts = await episode
            rollouts += job_rollouts
            if job.rollout_id in tools:
                scoring |= {rollout.rollout_id: tools[job.rollout_id].run_scoring_call for rollout in job_rollouts}
        batches = [rollouts] if settings.grades_groups else [[rollout] for rollout in rollouts]
        try:
            for batch in batches:
                graded = [rollout for rollout in batch if not rollout.dropped]
                if settings.grader is not None and graded:
                    detail = f"and {len(graded) - 1} others of its task" if len(graded) > 1 else ""
                    with waiting("reward of rollout", graded[0].rollout_id, detail):
                        await settings.grader.grade(graded, scoring)
                        for rollout in graded:
                            rollout.graded = True
                if on_done is not None:
                    for rollout in batch:
                        on_done(rollout)
        finally:
            runners = [tools.pop(job.rollout_id) for job, _ in episodes if job.rollout_id in tools]
            await asyncio.gather(*(runner.close() for runner in runners))

    def check_dropped(self, rollouts: Sequence[Rollout]) -> None:
        """See `FailurePolicy.check_dropped`."""
        self._failure.check_dropped(rollouts)


def _load_saved(job: Job, saved: SavedStates | None) -> tuple[EpisodeState | None, dict[str, Any] | None]:
    """Return the saved states of an episode and of its environment, if there are any."""
    state = None if saved is None else saved.load(job.rollout_id, job.task.id)
    return (None, None) if state is None else EpisodeState.from_dict(state)


@asynccontextmanager
async def _close_on_error(tools: ToolRunner) -> AsyncIterator[None]:
    """End the tool sessions of an attempt that raises: it is not graded."""
    try:
        yield
    except BaseException:
        await tools.close()
        raise


async def _play(episode: MultiAgentEpisode) -> tuple[list[Rollout], ToolRunner, EpisodeError | None]:
    """Run an episode of several agents. Return its rollouts, what runs its tools, and what ended it, if it failed."""
    failure, raised = None, None
    try:
        async with _close_on_error(episode.tools):
            await episode.run()
    except EpisodeError as error:
        failure, raised = error.as_failure(), error
    return episode.rollouts(failure), episode.tools, raised
