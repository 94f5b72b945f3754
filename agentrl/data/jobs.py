"""Episodes to run, from the tasks of a run."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from agentrl.config.schema import Config
from agentrl.core.data_source import DataSource
from agentrl.core.lineup import Lineup
from agentrl.core.task import Task, task_source_name
from agentrl.core.types import FailureKind, Rollout
from agentrl.data.buffer import DataBuffer, Epochs, load_buffer_filter

OnDone = Callable[[Rollout], None]

INFRASTRUCTURE = frozenset({FailureKind.SAMPLER, FailureKind.TOOL, FailureKind.SANDBOX, FailureKind.RUNNER})
"""Failures that are neither the task's nor the policy's."""


@dataclass(frozen=True, slots=True)
class Job:
    """One episode to run."""

    task: Task
    """The problem; its id becomes the ``prompt_id``."""
    seed: int
    """Seeds the policy's samples."""
    rollout_id: str
    """Unique in the run."""
    reset_seed: int | None = None
    """Seeds the environment; if None, ``seed`` does."""
    lineup: Lineup | None = None
    """Who plays in a multi-agent episode; if None, the runner's lineup."""


class TaskJobs:
    """The episodes of the tasks of a run.

    Args:
        config: of the run.
        data_source: chooses the tasks.
        batch_size: with which the run began, for the names of groups; None: ``rollout.batch_size``. Another one would give
            names again that earlier groups have.
        epochs: how often the tasks are gone through; None: without end.
    """

    def __init__(
        self, config: Config, data_source: DataSource, batch_size: int | None = None, epochs: Epochs | None = None
    ) -> None:
        key = f"rollout.buffer_filter={config.rollout.buffer_filter}"
        self.buffer = DataBuffer(data_source, load_buffer_filter(config.rollout), key, epochs)
        """Tasks by position."""
        self._batch_size = batch_size or config.rollout.batch_size
        self._seed = config.run.seed
        self._samples = config.rollout.n_samples_per_prompt
        self._resets = {name: source.rollout.reset_seed for name, source in config.by_source().items()}

    def group(self, position: int) -> list[Job]:
        """Return the episodes of the task at a position, with ids such as ``3/0/1``: as if each step took the next tasks.

        The numbers are those of the step, from 1, of the task in the step, and of the sample.
        """
        seed, task = self._seed, self.buffer[position]
        step, offset = divmod(position, self._batch_size)
        by_task = self._resets["" if "" in self._resets else task_source_name(task.id)] == "task"
        reset = episode_seed(seed, "reset", task.id) if by_task else None
        return [
            Job(task, episode_seed(seed, position, sample), f"{step + 1}/{offset}/{sample}", reset)
            for sample in range(self._samples)
        ]

    def groups(self, positions: Iterable[int]) -> list[Job]:
        """Return the episodes of the tasks at ``positions``."""
        return [job for position in positions for job in self.group(position)]

    def close(self) -> None:
        """Free what the data source holds."""
        self.buffer.data_source.close()

    def on_trained(self, trained: Container[int], rollouts: Sequence[Rollout]) -> None:
        """Give the data buffer the results of a step's rollouts, those of filtered groups included; see `DataBuffer.on_trained`.

        A task is lost if failures of the infrastructure dropped all of its rollouts.
        """
        groups: dict[str, list[Rollout]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.prompt_id, []).append(rollout)
        rewards = {
            task: [rollout.reward for rollout in group if not rollout.dropped or rollout.filtered]
            for task, group in groups.items()
        }
        lost = {task for task, group in groups.items() if all(map(_is_lost, group))}
        self.buffer.on_trained(trained, {task: values for task, values in rewards.items() if values}, lost)


def _is_lost(rollout: Rollout) -> bool:
    return rollout.dropped and rollout.failure is not None and rollout.failure.kind in INFRASTRUCTURE


def episode_seed(run_seed: int, *identifiers: str | int) -> int:
    """Return a seed for one episode from the run's seed and the episode's identifiers; equal in every process."""
    return zlib.crc32("/".join(str(identifier) for identifier in (run_seed, *identifiers)).encode()) & 0x7FFFFFFF
