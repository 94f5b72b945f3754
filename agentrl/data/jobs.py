"""Episodes to run, from the tasks of a run."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from agentrl.config.schema import Config
from agentrl.core.data_source import DataSource
from agentrl.core.lineup import Lineup
from agentrl.core.task import Task, source_of
from agentrl.core.types import FailureKind, Rollout
from agentrl.data.buffer import DataBuffer, load_buffer_filter

OnDone = Callable[[Rollout], None]

INFRASTRUCTURE = frozenset({FailureKind.SAMPLER, FailureKind.TOOL, FailureKind.SANDBOX})
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


def episode_seed(run_seed: int, *parts: str | int) -> int:
    """Return a seed for one episode from the run's seed and the episode's identifiers; equal in every process."""
    return zlib.crc32("/".join(str(part) for part in (run_seed, *parts)).encode()) & 0x7FFFFFFF
