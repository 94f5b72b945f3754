"""Runs episodes, hundreds at once, and turns whatever happens to them into rollouts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from agentrl.env import Env
from agentrl.episode.failure import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.play import Episode, Services
from agentrl.episode.state import EpisodeState
from agentrl.errors import EpisodeError, RunStopped
from agentrl.protocols import Renderer, Sampler, ToolClient
from agentrl.task import Task
from agentrl.types import Failure, Rollout, SamplingParams, StopReason


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
        tool_clients: by tool name, for environments that return `ToolCalls`.
        limits: of every episode.
        sampling: of every turn.
        failure: decides what a failed episode becomes.
        max_concurrency: episodes that run at the same time, and threads for plain environment methods.
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
    ) -> None:
        # Threads are started as they are needed and end with the runner.
        pool = ThreadPoolExecutor(max_concurrency, thread_name_prefix="env")
        self._services = Services(env_factory, renderer, sampler, tool_clients, limits, sampling, pool)
        self._failure = failure
        self._slots = asyncio.Semaphore(max_concurrency)

    async def run(self, task: Task, seed: int, rollout_id: str) -> Rollout:
        """Play one episode, again where the failure policy says so, and return what came of it.

        Raises:
            RunStopped: the failure policy stops the run over it.
        """
        async with self._slots:
            attempt = 0
            while True:
                rollout = await self._attempt(task, EpisodeState(rollout_id, seed, attempt))
                if rollout.failure is None:
                    return rollout
                action = self._failure.decide(rollout.failure, attempt)
                if action == "stop":
                    raise RunStopped(f"episode {rollout_id} failed and rollout.failure.{rollout.failure.kind.value}=stop: "
                                     f"{_describe(rollout.failure)}")  # fmt: skip
                if action != "retry":
                    rollout.dropped = action == "drop"
                    return rollout
                attempt += 1

    async def run_many(self, jobs: Sequence[Job], on_done: Callable[[Rollout], None] | None = None) -> list[Rollout]:
        """Play all jobs and return their rollouts in the jobs' order; ``on_done`` gets each as it ends.

        Cancelling it aborts every request and closes every session.

        Raises:
            RunStopped: the failure policy stops the run over one episode, or over how many of these were dropped.
        """

        async def play(job: Job) -> Rollout:
            rollout = await self.run(job.task, job.seed, job.rollout_id)
            if on_done is not None:
                on_done(rollout)
            return rollout

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(play(job)) for job in jobs]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first ended the others
        rollouts = [task.result() for task in tasks]
        self._check_dropped(rollouts)
        return rollouts

    async def _attempt(self, task: Task, state: EpisodeState) -> Rollout:
        episode = Episode(self._services, task, state)
        failure: Failure | None = None
        try:
            reason = await episode.play()
        except EpisodeError as error:
            failure, reason = error.as_failure(), StopReason.FAILED
        return Rollout(
            prompt_id=task.id,
            rollout_id=state.rollout_id,
            rows=state.trajectory.rows(task.id, state.rollout_id),
            reward=state.reward,
            stop_reason=reason,
            metrics=state.metrics,
            turns=state.turns,
            prompt=state.prompt,
            failure=failure,
            dropped=reason is StopReason.ABORTED,  # cut at no point of its own choosing
            seconds=episode.seconds,
            sampled_tokens=state.trajectory.sampled_tokens,
            metadata=dict(task.metadata),
        )

    def _check_dropped(self, rollouts: Sequence[Rollout]) -> None:
        failures = [rollout.failure for rollout in rollouts if rollout.dropped and rollout.failure is not None]
        if self._failure.too_many(len(failures), len(rollouts)):
            common, times = Counter(_describe(failure) for failure in failures).most_common(1)[0]
            raise RunStopped(
                f"{len(failures)} of {len(rollouts)} episodes failed for good, more than "
                f"rollout.failure.max_failed_share={self._failure.config.max_failed_share:g}; {times} of them with: {common}"
            )


def _describe(failure: Failure) -> str:
    return f"{failure.error}: {failure.message}"
