"""The episodes of a training step, and the checks of services while they run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
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


def step_jobs(config: Config, order: TaskOrder | MixedOrder, step: int, position: int, tasks: int) -> list[Job]:
    """Return the episodes of a step: one group for each of ``tasks`` tasks from ``position`` on."""
    seed, rollout = config.run.seed, config.rollout
    resets = {name: each.rollout.reset_seed for name, each in config.by_source().items()}
    return [
        Job(
            task,
            episode_seed(seed, position + offset, sample),
            f"{step}/{offset}/{sample}",
            episode_seed(seed, "reset", task.id)
            if resets[source_of(task.id) if config.sources else ""] == "task"
            else None,
        )
        for offset, task in enumerate(order.take(position, tasks))
        for sample in range(rollout.n_samples_per_prompt)
    ]


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
