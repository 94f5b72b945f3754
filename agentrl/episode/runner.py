"""Runs episodes, hundreds at once, and turns whatever happens to them into rollouts."""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from agentrl.core.env import Env
from agentrl.core.errors import EpisodeError, RunStopped
from agentrl.core.sampler import Sampler
from agentrl.core.task import Task
from agentrl.core.tool import Tool, ToolClient
from agentrl.core.types import Failure, Rollout, SamplingParams, StopReason
from agentrl.episode.chat import Agent
from agentrl.episode.context import EpisodeContext
from agentrl.episode.custom_loop import Generate, play_generate
from agentrl.episode.environment_episode import Episode
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.grading import Grading, Played
from agentrl.episode.limits import Limits
from agentrl.episode.result import as_rollout
from agentrl.episode.state import EpisodeState
from agentrl.episode.tool_calls import ToolRunner
from agentrl.render.base import Renderer
from agentrl.rewards.base import Grader


@dataclass(frozen=True, slots=True)
class Job:
    """One episode to run."""

    task: Task
    """The problem; its id becomes the ``prompt_id``."""
    seed: int
    """Seeds the environment."""
    rollout_id: str
    """Unique in the run."""


class EpisodeRunner:
    """Plays episodes with one policy in one kind of environment.

    Args:
        env_factory: builds an environment for one episode.
        renderer: of the policy's chat template.
        sampler: samples turns.
        tool_clients: by registered name, for tools with a server.
        limits: of every episode.
        sampling: of every turn.
        failure: decides what a failed episode becomes.
        max_concurrency: episodes that run at the same time, and threads for plain environment methods.
        generate: plays the episodes in place of an environment.
        grader: gives `run_many`'s rollouts their reward; those that were dropped are not graded.
        served: the servers' tools by name, as the policy may call them.
    """

    def __init__(
        self,
        *,
        env_factory: Callable[[], Env],
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
    ) -> None:
        # Threads are started as they are needed and end with the runner.
        pool = ThreadPoolExecutor(max_concurrency, thread_name_prefix="env")
        self._context = EpisodeContext(
            env_factory, renderer, sampler, tool_clients, limits, sampling, pool, served=served or {}
        )
        self._failure = failure
        self._generate = generate
        self._grader = grader
        self._slots = asyncio.Semaphore(max_concurrency)

    def with_sampling(
        self,
        *,
        temperature: float,
        top_p: float,
        top_k: int,
        max_new_tokens: int | None = None,
        ignore_eos: bool = False,
    ) -> EpisodeRunner:
        """Return a runner that samples so and shares all else with this one, the limit on concurrency too.

        Without ``max_new_tokens`` a turn may have as many tokens as here.
        """
        context = self._context
        tokens = max_new_tokens or context.limits.max_new_tokens
        other = copy.copy(self)
        other._context = replace(
            context,
            limits=replace(context.limits, max_new_tokens=tokens),
            sampling=replace(
                context.sampling,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                max_new_tokens=tokens,
                ignore_eos=ignore_eos,
            ),
        )
        return other

    async def run(self, task: Task, seed: int, rollout_id: str) -> list[Rollout]:
        """Play one episode, again where the failure policy says so, and return what came of it, not graded: one rollout,
        or as many as a generate function returns.

        Raises:
            RunStopped: the failure policy stops the run over it.
        """
        played = await self._play(task, seed, rollout_id, graded=False)
        return played.rollouts

    async def _play(self, task: Task, seed: int, rollout_id: str, *, graded: bool) -> Played:
        """Play one episode; where it is ``graded``, the sessions of its last attempt stay open for that."""
        async with self._slots:
            attempt = 0
            while True:
                played = await self._attempt(task, seed, rollout_id, attempt)
                failure = played.rollouts[0].failure
                action = self._failure.decide(failure, attempt) if failure is not None else "train"
                if action == "train" and graded:
                    return played
                await played.tools.close()
                if action == "stop" and failure is not None:
                    raise RunStopped(
                        f"episode {rollout_id} failed and rollout.failure.{failure.kind.value}=stop: {_describe(failure)}"
                    )
                if action != "retry":
                    for rollout in played.rollouts:
                        rollout.dropped = rollout.dropped or action == "drop"
                    return played
                attempt += 1

    async def run_many(self, jobs: Sequence[Job], on_done: Callable[[Rollout], None] | None = None) -> list[Rollout]:
        """Play all jobs and return their rollouts in the jobs' order; ``on_done`` gets each once it has its reward.

        A grader of single rollouts is asked as each episode ends, one of groups when all episodes of a task among the
        ``jobs`` have ended; until then the sessions of the tools that they called stay open. Cancelling it aborts every
        request and closes every session.

        Raises:
            RunStopped: the failure policy stops the run over one episode, or over how many of these were dropped; or
                the grader does.
        """
        grading = Grading(self._grader, (job.task.id for job in jobs), on_done)

        async def play(number: int, job: Job) -> list[Rollout]:
            played = await self._play(job.task, job.seed, job.rollout_id, graded=self._grader is not None)
            await grading.ended(number, job.task.id, played)
            return played.rollouts

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(play(number, job)) for number, job in enumerate(jobs)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first ended the others
        finally:
            await grading.close()
        rollouts = [rollout for task in tasks for rollout in task.result()]
        self._check_dropped(rollouts)
        return rollouts

    async def _attempt(self, task: Task, seed: int, rollout_id: str, attempt: int) -> Played:
        if self._generate is not None:
            agent = Agent(self._context, task, seed=seed, rollout_id=rollout_id, attempt=attempt)
            async with _closed_if_cut(agent.tools):
                return Played(await play_generate(self._generate, self._context, agent), agent.tools)
        episode = Episode(self._context, task, EpisodeState(rollout_id, seed, attempt))
        failure: Failure | None = None
        try:
            async with _closed_if_cut(episode.tools):
                reason = await episode.play()
        except EpisodeError as error:
            failure, reason = error.as_failure(), StopReason.FAILED
        return Played(
            [as_rollout(task, episode.state, reason, episode.seconds, episode.tools.seconds, failure)], episode.tools
        )

    def _check_dropped(self, rollouts: Sequence[Rollout]) -> None:
        failures = [rollout.failure for rollout in rollouts if rollout.dropped and rollout.failure is not None]
        if self._failure.too_many(len(failures), len(rollouts)):
            common, times = Counter(_describe(failure) for failure in failures).most_common(1)[0]
            raise RunStopped(
                f"{len(failures)} of {len(rollouts)} episodes failed for good, more than "
                f"rollout.failure.max_failed_share={self._failure.config.max_failed_share:g}; {times} of them with: {common}"
            )


@asynccontextmanager
async def _closed_if_cut(tools: ToolRunner) -> AsyncIterator[None]:
    """End sessions on the way out of an attempt that nobody will score."""
    try:
        yield
    except BaseException:
        await tools.close()
        raise


def _describe(failure: Failure) -> str:
    return f"{failure.error}: {failure.message}"
