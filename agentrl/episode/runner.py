"""Runs episodes concurrently and returns them as rollouts, failed ones included."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from agentrl.core.errors import EpisodeError, RunStopped
from agentrl.core.lineup import Lineup
from agentrl.core.sampler import Sampler
from agentrl.core.task import Task, source_of
from agentrl.core.tool import CallTool, Tool, ToolClient
from agentrl.core.types import Failure, Rollout, SamplingParams, StopReason
from agentrl.data.jobs import Job
from agentrl.episode.chat import Agent
from agentrl.episode.context import EnvFactory, EpisodeContext
from agentrl.episode.custom_loop import Generate, run_custom_loop
from agentrl.episode.environment_episode import Episode
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.multi_agent_episode import MultiAgentEpisode
from agentrl.episode.state import EpisodeState, SavedStates
from agentrl.episode.tool_calls import ToolRunner
from agentrl.obs.waiting import waiting
from agentrl.render.base import Renderer
from agentrl.rewards.base import Grader

_RunningEpisode = tuple[Job, asyncio.Task[list[Rollout]]]
_STARTS = 64
"""Episodes that begin in one iteration of the event loop: the start of thousands must not hold it up for seconds."""


class EpisodeRunner:
    """Runs episodes of one policy in one kind of environment, or with `of_sources` in several.

    Args:
        env_factory: builds an environment for one episode.
        renderer: renders and parses the policy's chat format.
        sampler: samples turns.
        tool_clients: by registered name, for tools with a server.
        limits: limits of every episode.
        sampling: sampling parameters of every turn.
        failure: decides what a failed episode becomes.
        max_concurrency: episodes that run at the same time, and threads for synchronous environment methods.
        generate: runs the episodes in place of an environment.
        grader: gives the rollouts of `run_many` their reward, except for dropped ones.
        served: the servers' tools by name, as the policy may call them.
        lineup: who plays, if the environment has several agents; None if it has one.
    """

    def __init__(
        self,
        *,
        env_factory: EnvFactory,
        renderer: Renderer,
        sampler: Sampler,
        tool_clients: Mapping[str, ToolClient],
        limits: Limits,
        sampling: SamplingParams,
        failure: FailurePolicy,
        max_concurrency: int,
        generate: Generate | None = None,
        grader: Grader | None = None,
        served: Mapping[str, Tool] | None = None,
        lineup: Lineup | None = None,
    ) -> None:
        # Threads are started as they are needed and end with the runner.
        pool = ThreadPoolExecutor(max_concurrency, thread_name_prefix="env")
        self._context = EpisodeContext(
            env_factory, renderer, sampler, tool_clients, limits, sampling, pool, served=served or {}
        )
        self._failure = failure
        self._generate = generate
        self._grader = grader
        self._lineup = lineup
        self._slots = asyncio.Semaphore(max_concurrency)
        self._by_source: Mapping[str, EpisodeRunner] = {}

    @classmethod
    def of_sources(cls, runners: Mapping[str, EpisodeRunner]) -> EpisodeRunner:
        """Return a runner of the jobs of a mixed run: each job has environment, limits, tools and grader of its source.

        Args:
            runners: by source. All jobs share the limit on concurrency and the failure policy of the first.
        """
        joined = copy.copy(next(iter(runners.values())))
        joined._by_source = runners
        return joined

    def _of(self, job: Job) -> EpisodeRunner:
        """Return the runner of a job's source."""
        return self._by_source[source_of(job.task.id)] if self._by_source else self

    @property
    def has_single_rollouts(self) -> bool:
        """Whether each episode is one rollout, with the id of its job."""
        runners = self._by_source.values() or [self]
        return all(one._generate is None and one._lineup is None for one in runners)

    def with_sampling(
        self,
        *,
        temperature: float,
        top_p: float,
        top_k: int,
        max_new_tokens: int | None = None,
        ignore_eos: bool = False,
    ) -> EpisodeRunner:
        """Return a runner with these sampling parameters that shares everything else, the limit on concurrency included.

        Its engines return no experts. Without ``max_new_tokens`` the limit of this runner stays.
        """
        tokens = max_new_tokens or self._context.limits.max_new_tokens
        changes: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "ignore_eos": ignore_eos}
        return self._with(tokens, changes | {"max_new_tokens": tokens, "experts_from": None})

    def _with(self, tokens: int, changes: Mapping[str, Any]) -> EpisodeRunner:
        other, context = copy.copy(self), self._context
        limits = replace(context.limits, max_new_tokens=tokens)
        other._context = replace(context, limits=limits, sampling=replace(context.sampling, **changes))
        other._by_source = {name: one._with(tokens, changes) for name, one in self._by_source.items()}
        return other

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
        """Run all jobs and return their rollouts in the jobs' order.

        Args:
            jobs: the episodes.
            on_done: gets each rollout once it has its reward.
            on_ended: called when an episode has ended, before it is graded.
            check_dropped: see `check_dropped`, which is called with the rollouts.
            saved: saves episodes of an environment of one agent between turns; they go on from their saved states.

        A grader of single rollouts is called as each episode ends, one of groups when all episodes of a task have ended;
        until then the tool sessions of these episodes stay open. So with a grader of groups a tool server holds up to
        ``rollout.batch_size`` times ``rollout.n_samples_per_prompt`` sessions, and its ``max_sessions`` must allow that
        many. Cancellation aborts every request and closes every session.

        Raises:
            RunStopped: the failure policy stops the run over one episode or over the number of dropped ones, or the
                grader does.
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
                for together in self._graded_together(episodes):
                    group.create_task(self._grade(together, tools, on_done))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first ended the others
        finally:
            await asyncio.gather(*(runner.close() for runner in tools.values()))
        rollouts = [rollout for _, episode in episodes for rollout in episode.result()]
        if check_dropped:
            self.check_dropped(rollouts)
        return rollouts

    async def _run_job(
        self, job: Job, open_tools: dict[str, ToolRunner] | None = None, saved: SavedStates | None = None
    ) -> list[Rollout]:
        """Run one episode, again if the failure policy says so.

        The tool sessions of its last attempt stay open for grading if there is a grader and ``open_tools``, which then
        gets them by the job's ``rollout_id``.
        """
        source = self._of(job)
        context, generate, lineup = source._context, source._generate, job.lineup or source._lineup
        async with self._slots:
            begun, env_state = _begun(job, saved) if source.has_single_rollouts else (None, None)
            for attempt in itertools.count(0 if begun is None else begun.attempt):
                state = begun or EpisodeState(job.rollout_id, job.seed, attempt, job.reset_seed)
                if generate is not None:
                    agent = Agent(context, job.task, state)
                    tools, raised = agent.tools, None
                    async with _closed_on_error(tools):
                        rollouts = await run_custom_loop(generate, context, agent)
                elif lineup is not None:
                    rollouts, tools, raised = await _play(MultiAgentEpisode(context, job.task, state, lineup))
                else:
                    episode = Episode(context, job.task, state, env_state, saved=saved)
                    tools, failure, raised = episode.tools, None, None
                    try:
                        async with _closed_on_error(tools):
                            reason = await episode.run()
                    except EpisodeError as error:
                        failure, reason, raised = error.as_failure(), StopReason.FAILED, error
                    rollout = episode.conversation.rollout(
                        job.task, reason, seconds=episode.seconds, tool_seconds=tools.seconds, failure=failure
                    )
                    rollouts = [rollout]
                failure = rollouts[0].failure
                action = self._failure.decide(failure, attempt) if failure is not None else "train"
                if action == "train" and source._grader is not None and open_tools is not None:
                    open_tools[job.rollout_id] = tools
                    return rollouts
                await tools.close()
                if action == "stop" and failure is not None:
                    raise RunStopped(
                        f"episode {job.rollout_id} failed and rollout.failure.{failure.kind.value}=stop: "
                        f"{_describe(failure)}"
                    ) from raised
                if action != "retry":
                    for rollout in rollouts:
                        rollout.dropped = rollout.dropped or action == "drop"
                    return rollouts
                begun = env_state = None
        raise AssertionError("the loop returns or raises")

    def _graded_together(self, episodes: Sequence[_RunningEpisode]) -> list[list[_RunningEpisode]]:
        """Return the episodes in groups that are graded in one call: single ones, or all of a task in the jobs' order."""
        together: dict[str | int, list[_RunningEpisode]] = {}
        for number, episode in enumerate(episodes):
            grader = self._of(episode[0])._grader
            whole = grader is not None and grader.group
            together.setdefault(episode[0].task.id if whole else number, []).append(episode)
        return list(together.values())

    async def _grade(
        self,
        episodes: Sequence[_RunningEpisode],
        tools: dict[str, ToolRunner],
        on_done: Callable[[Rollout], None] | None,
    ) -> None:
        """Wait for the episodes, grade their rollouts and end their tool sessions."""
        grader = self._of(episodes[0][0])._grader
        rollouts: list[Rollout] = []
        scoring: dict[str, CallTool] = {}
        for job, episode in episodes:
            ended = await episode
            rollouts += ended
            if job.rollout_id in tools:
                scoring |= {rollout.rollout_id: tools[job.rollout_id].run_scoring_call for rollout in ended}
        batches = [rollouts] if grader is not None and grader.group else [[one] for one in rollouts]
        try:
            for batch in batches:
                graded = [rollout for rollout in batch if not rollout.dropped]
                if grader is not None and graded:
                    others = f"and {len(graded) - 1} others of its task" if len(graded) > 1 else ""
                    with waiting("reward of rollout", graded[0].rollout_id, others):
                        await grader.grade(graded, scoring)
                if on_done is not None:
                    for rollout in batch:
                        on_done(rollout)
        finally:
            ours = [tools.pop(job.rollout_id) for job, _ in episodes if job.rollout_id in tools]
            await asyncio.gather(*(runner.close() for runner in ours))

    def check_dropped(self, rollouts: Sequence[Rollout]) -> None:
        """Check the number of dropped episodes.

        Raises:
            RunStopped: it is more than ``rollout.failure.max_failed_share`` of them.
        """
        failures = [rollout.failure for rollout in rollouts if rollout.dropped and rollout.failure is not None]
        if self._failure.too_many(len(failures), len(rollouts)):
            common, times = Counter(_describe(failure) for failure in failures).most_common(1)[0]
            raise RunStopped(
                f"{len(failures)} of {len(rollouts)} episodes failed for good, more than "
                f"rollout.failure.max_failed_share={self._failure.config.max_failed_share:g}; {times} of them with: {common}"
            )


def _begun(job: Job, saved: SavedStates | None) -> tuple[EpisodeState | None, dict[str, Any] | None]:
    """Return the saved states of an episode and of its environment, if there are any."""
    state = None if saved is None else saved.load(job.rollout_id, job.task.id)
    return (None, None) if state is None else EpisodeState.from_dict(state)


@asynccontextmanager
async def _closed_on_error(tools: ToolRunner) -> AsyncIterator[None]:
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
        async with _closed_on_error(episode.tools):
            await episode.run()
    except EpisodeError as error:
        failure, raised = error.as_failure(), error
    return episode.rollouts(failure), episode.tools, raised


def _describe(failure: Failure) -> str:
    return f"{failure.error}: {failure.message}"
