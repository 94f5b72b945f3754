"""Where the rollouts of a step come from: sampled with the present policy here, or from disk (`agentrl.replay`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from agentrl.config.schema import Config
from agentrl.episode.runner import EpisodeRunner, Job
from agentrl.errors import AgentrlError
from agentrl.eval import evaluate_watched
from agentrl.evaluation.result import SetResult
from agentrl.evaluation.sets import TaskChoice
from agentrl.interrupt import Interrupt
from agentrl.obs.rollouts import RolloutRecorder
from agentrl.protocols import LearnerGroup, WeightSync
from agentrl.stack import Stack
from agentrl.tasksource import TaskOrder, episode_seed
from agentrl.types import Rollout

OnDone = Callable[[Rollout], None]


class RolloutSource(Protocol):
    """Gives a trainer its rollouts."""

    @property
    def steps(self) -> int:
        """Steps to train."""
        ...

    @property
    def samples(self) -> bool:
        """Whether rollouts are sampled as they are taken; otherwise the time that takes says nothing."""
        ...

    @property
    def pad_token_id(self) -> int:
        """The token that fills batches."""
        ...

    @property
    def sets(self) -> Sequence[TaskChoice]:
        """What to evaluate on; without any nothing is evaluated."""
        ...

    async def follow(self, learner: LearnerGroup, version: int) -> None:
        """Bring the learner's weights, as policy ``version``, to whoever samples."""
        ...

    async def take(self, step: int, position: int) -> list[Rollout]:
        """Return the rollouts of ``step`` (from 1); ``position`` tasks were taken before.

        Raises:
            AgentrlError: they cannot be had; `RunStopped` where Ctrl-C or the failure policy ends the run.

        """
        ...

    async def trained(self, step: int, advantages: Mapping[str, float]) -> None:
        """Hear, by ``rollout_id``, with which advantages the rollouts of ``step`` are trained."""
        ...

    async def evaluate(self, on_done: OnDone) -> list[SetResult]:
        """Evaluate on `sets`; ``on_done`` gets every rollout."""
        ...


@dataclass(slots=True)
class Sampling:
    """Implements `RolloutSource` with the engine and the tool servers of a run."""

    config: Config
    stack: Stack
    order: TaskOrder
    sync: WeightSync
    recorder: RolloutRecorder
    interrupt: Interrupt
    sets: Sequence[TaskChoice] = ()
    """What to evaluate on."""
    _runner: EpisodeRunner | None = field(default=None, init=False)

    @property
    def steps(self) -> int:
        """Return ``train.steps``."""
        return self.config.train.steps

    @property
    def samples(self) -> bool:
        """Yes."""
        return True

    @property
    def pad_token_id(self) -> int:
        """The tokenizer's."""
        return self.stack.renderer.pad_token_id

    async def follow(self, learner: LearnerGroup, version: int) -> None:
        """Send the weights to the engine."""
        await self.sync.push(learner, [self.stack.client], version)

    async def take(self, step: int, position: int) -> list[Rollout]:
        """Play a step's episodes; each rollout is on disk once it has its reward."""
        jobs = step_jobs(self.config, self.order, step, position, self.config.rollout.batch_size)
        self.recorder.begin(step, jobs[0].task.id)
        self._runner = self._runner or self.stack.runner()
        return await sample_watched(self._runner, jobs, self.stack, self.interrupt, partial(self.recorder.write, step))

    async def trained(self, step: int, advantages: Mapping[str, float]) -> None:
        """Write the advantages beside the step's rollouts."""
        await asyncio.to_thread(self.recorder.finish, step, advantages)

    async def evaluate(self, on_done: OnDone) -> list[SetResult]:
        """Play the episodes of all sets."""
        return await evaluate_watched(self.sets, self.stack, self.interrupt, on_done)


def step_jobs(config: Config, order: TaskOrder, step: int, position: int, tasks: int) -> list[Job]:
    """Return the episodes of a step: of each of the ``tasks`` from ``position`` on a group of them."""
    return [
        Job(task, episode_seed(config.run.seed, position + offset, sample), f"{step}/{offset}/{sample}")
        for offset, task in enumerate(order.take(position, tasks))
        for sample in range(config.rollout.n_samples_per_prompt)
    ]


async def sample_watched(
    runner: EpisodeRunner, jobs: Sequence[Job], stack: Stack, interrupt: Interrupt, on_done: OnDone
) -> list[Rollout]:
    """Play episodes. Ctrl-C ends them, and a server that dies ends them with the server's own error."""
    try:
        return await interrupt.guard(runner.run_many(jobs, on_done), stack.check)
    except AgentrlError:
        stack.check()
        raise
