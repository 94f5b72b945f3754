"""The episodes of a training step, and sampling them with checks of the services."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentrl.config.schema import Config
from agentrl.core.errors import AgentrlError
from agentrl.core.types import Rollout
from agentrl.episode.runner import EpisodeRunner, Job
from agentrl.runtime.interrupt import Interrupt
from agentrl.runtime.services import Services
from agentrl.runtime.task_order import TaskOrder, episode_seed

OnDone = Callable[[Rollout], None]


def step_jobs(config: Config, order: TaskOrder, step: int, position: int, tasks: int) -> list[Job]:
    """Return the episodes of a step: one group for each of ``tasks`` tasks from ``position`` on."""
    return [
        Job(task, episode_seed(config.run.seed, position + offset, sample), f"{step}/{offset}/{sample}")
        for offset, task in enumerate(order.take(position, tasks))
        for sample in range(config.rollout.n_samples_per_prompt)
    ]


async def sample_watched(
    runner: EpisodeRunner, jobs: Sequence[Job], services: Services, interrupt: Interrupt, on_done: OnDone
) -> list[Rollout]:
    """Run episodes. Ctrl-C ends them; a server that dies ends them with the server's own error."""
    try:
        return await interrupt.guard(runner.run_many(jobs, on_done), services.check)
    except AgentrlError:
        services.check()
        raise
