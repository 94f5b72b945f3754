"""The episodes of training, and the checks of services while they run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Container, Iterable, Sequence
from contextlib import asynccontextmanager

from agentrl.config.schema import Config
from agentrl.core.data_source import DataSource
from agentrl.core.errors import AgentrlError
from agentrl.core.task import source_of
from agentrl.core.types import FailureKind, Rollout
from agentrl.episode.runner import Job
from agentrl.runtime.data_buffer import DataBuffer, load_buffer_filter
from agentrl.runtime.interrupt import Interrupt
from agentrl.runtime.services import Services
from agentrl.runtime.task_order import episode_seed

OnDone = Callable[[Rollout], None]

INFRASTRUCTURE = frozenset({FailureKind.SAMPLER, FailureKind.TOOL, FailureKind.SANDBOX})
"""Failures that are neither the task's nor the policy's."""


class TaskJobs:
    """The episodes of the tasks of a run."""

    def __init__(self, config: Config, source: DataSource) -> None:
        key = f"rollout.buffer_filter={config.rollout.buffer_filter}"
        self.buffer = DataBuffer(source, load_buffer_filter(config), key)
        """Tasks by position."""
        self._seed = config.run.seed
        self._samples = config.rollout.n_samples_per_prompt
        self._resets = {name: each.rollout.reset_seed for name, each in config.by_source().items()}

    def group(self, position: int, name: str) -> list[Job]:
        """Return the episodes of the task at a position; their ids are ``name`` and the number of the sample."""
        seed, task = self._seed, self.buffer[position]
        by_task = self._resets["" if "" in self._resets else source_of(task.id)] == "task"
        reset = episode_seed(seed, "reset", task.id) if by_task else None
        return [
            Job(task, episode_seed(seed, position, sample), f"{name}/{sample}", reset)
            for sample in range(self._samples)
        ]

    def step(self, step: int, positions: Iterable[int]) -> list[Job]:
        """Return the episodes of a step: one group for each of ``positions``."""
        return [job for offset, position in enumerate(positions) for job in self.group(position, f"{step}/{offset}")]

    def close(self) -> None:
        """Free what the data source holds."""
        self.buffer.source.close()

    def on_trained(self, trained: Container[int], rollouts: Sequence[Rollout]) -> None:
        """Give the data buffer the results of a step's rollouts, those of filtered groups included; see `DataBuffer.on_trained`.

        A task is lost if failures of the infrastructure dropped all of its rollouts.
        """
        groups: dict[str, list[Rollout]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.prompt_id, []).append(rollout)
        rewards = {
            name: [one.reward for one in some if not one.dropped or one.filtered] for name, some in groups.items()
        }
        lost = {name for name, some in groups.items() if all(map(_is_lost, some))}
        self.buffer.on_trained(trained, {name: some for name, some in rewards.items() if some}, lost)


def _is_lost(rollout: Rollout) -> bool:
    return rollout.dropped and rollout.failure is not None and rollout.failure.kind in INFRASTRUCTURE


@asynccontextmanager
async def watched(services: Services, interrupt: Interrupt) -> AsyncIterator[None]:
    """Run episodes in the body. A signal ends them, and a server that dies ends them with the server's own error."""
    try:
        async with interrupt.guard(services.check):
            yield
    except AgentrlError:
        interrupt.check()  # a signal to all processes has ended the servers, too
        services.check()
        raise
