"""Order of tasks in training, episode seeds, and tasksets of environments."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np

from agentrl.core.env import Env
from agentrl.core.errors import ConfigError
from agentrl.core.task import MadeTasks, Task, TaskSet

_NAMED = 5
"""Ids in a message."""


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


def check_ids(tasks: Sequence[Task], source: str) -> None:
    """Check that no two tasks have one id. Tasks that are made on access are compared when `TaskOrder` takes them.

    Args:
        tasks: of a split.
        source: of the tasks, for the message.

    Raises:
        ConfigError: several tasks have one id, and would be one group; the message has the ids.

    """
    if isinstance(tasks, MadeTasks):
        return
    places: dict[str, list[int]] = {}
    for number, task in enumerate(tasks):
        places.setdefault(task.id, []).append(number)
    if len(places) < len(tasks):
        raise _same_ids(source, {name: numbers for name, numbers in places.items() if len(numbers) > 1})


def _same_ids(source: str, places: Mapping[str, Sequence[int]]) -> ConfigError:
    named = [f"{name!r} (tasks {', '.join(map(str, numbers))})" for name, numbers in islice(places.items(), _NAMED)]
    more = f" and {len(places) - _NAMED} others" if len(places) > _NAMED else ""
    return ConfigError(
        f"{source} cannot be used: ids that several tasks have: {', '.join(named)}{more}. Episodes are grouped by the "
        "task's id, so each Task needs its own"
    )


class TaskOrder:
    """An endless order over a split: a new permutation every epoch, as a pure function of seed and position.

    The position alone determines the next tasks: a resumed run continues with the same tasks.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        assert len(tasks) > 0, "preflight refuses empty splits"
        self._tasks = tasks
        self._taken: dict[str, int] = {}
        self._seed = seed
        self._epoch = -1
        self._permutation = np.empty(0, np.int64)

    def __getitem__(self, position: int) -> Task:
        """Return the task at ``position`` since the run's start.

        Raises:
            ConfigError: another task had its id.

        """
        epoch, index = divmod(position, len(self._tasks))
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = np.random.default_rng([self._seed, epoch]).permutation(len(self._tasks))
        number = int(self._permutation[index])
        task = self._tasks[number]
        if (other := self._taken.setdefault(task.id, number)) != number:
            raise _same_ids("the tasks", {task.id: sorted((other, number))})
        return task

    def take(self, position: int, count: int) -> list[Task]:
        """Return ``count`` tasks from ``position`` on."""
        return [self[position + offset] for offset in range(count)]


def episode_seed(run_seed: int, *parts: str | int) -> int:
    """Return a seed for one episode from the run's seed and the episode's identifiers; equal in every process."""
    return zlib.crc32("/".join(str(part) for part in (run_seed, *parts)).encode()) & 0x7FFFFFFF
