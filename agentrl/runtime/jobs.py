"""The episodes of training, and the checks of services while they run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from agentrl.config.schema import Config
from agentrl.core.errors import AgentrlError
from agentrl.core.task import source_of
from agentrl.core.types import Rollout
from agentrl.episode.runner import Job
from agentrl.runtime.interrupt import Interrupt
from agentrl.runtime.services import Services
from agentrl.runtime.task_order import TaskOrder, episode_seed
from agentrl.runtime.task_sources import MixedOrder

OnDone = Callable[[Rollout], None]


class TaskJobs:
    """The episodes of the tasks of a run."""

    def __init__(self, config: Config, order: TaskOrder | MixedOrder) -> None:
        self._order = order
        self._seed = config.run.seed
        self._samples = config.rollout.n_samples_per_prompt
        self._resets = {name: each.rollout.reset_seed for name, each in config.by_source().items()}

    def group(self, position: int, name: str) -> list[Job]:
        """Return the episodes of the task at a position of the order; their ids are ``name`` and the number of the sample."""
        seed, task = self._seed, self._order[position]
        by_task = self._resets["" if "" in self._resets else source_of(task.id)] == "task"
        reset = episode_seed(seed, "reset", task.id) if by_task else None
        return [
            Job(task, episode_seed(seed, position, sample), f"{name}/{sample}", reset)
            for sample in range(self._samples)
        ]

    def step(self, step: int, positions: Iterable[int]) -> list[Job]:
        """Return the episodes of a step: one group for each of ``positions``."""
        return [job for offset, position in enumerate(positions) for job in self.group(position, f"{step}/{offset}")]


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
