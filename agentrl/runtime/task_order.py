"""Order of tasks in training, episode seeds, and tasksets of environments."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from agentrl.core.env import Env
from agentrl.core.task import Task, TaskSet


class EnvTasks(TaskSet):
    """The tasks of an environment class."""

    def __init__(self, env: type[Env], seed: int) -> None:
        self._env = env
        self._seed = seed

    def split(self, name: str) -> Sequence[Task]:
        """Return ``Env.tasks(name, seed)``."""
        return self._env.tasks(name, self._seed)


class NoTasks(TaskSet):
    """An empty taskset, for evaluations whose sets all have files."""

    def split(self, name: str) -> Sequence[Task]:
        """Return an empty sequence."""
        return ()


class TaskOrder:
    """An endless order over a split: a new permutation every epoch, as a pure function of seed and position.

    The position alone determines the next tasks: a resumed run continues with the same tasks.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        assert len(tasks) > 0, "preflight refuses empty splits"
        self._tasks = tasks
        self._seed = seed
        self._epoch = -1
        self._permutation = np.empty(0, np.int64)

    def __getitem__(self, position: int) -> Task:
        """Return the task at ``position`` since the run's start."""
        epoch, index = divmod(position, len(self._tasks))
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = np.random.default_rng([self._seed, epoch]).permutation(len(self._tasks))
        return self._tasks[int(self._permutation[index])]

    def take(self, position: int, count: int) -> list[Task]:
        """Return ``count`` tasks from ``position`` on."""
        return [self[position + offset] for offset in range(count)]


def episode_seed(run_seed: int, *parts: str | int) -> int:
    """Return a seed for one episode from the run's seed and the episode's identifiers; equal in every process."""
    return zlib.crc32("/".join(str(part) for part in (run_seed, *parts)).encode()) & 0x7FFFFFFF
