"""Order of tasks in training, episode seeds, and tasksets of environments."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from agentrl.core.data_source import DataSource
from agentrl.core.env import EnvBase
from agentrl.core.errors import AgentrlError, ConfigError
from agentrl.core.imports import describe
from agentrl.core.task import MadeTasks, Task, TaskSet

_NAMED = 5
"""Ids in a message."""


class EnvTasks(TaskSet):
    """The tasks of an environment class."""

    def __init__(self, env: type[EnvBase], seed: int) -> None:
        self._env = env
        self._seed = seed

    def split(self, name: str) -> Sequence[Task]:
        """Return ``Env.tasks(name, seed)``."""
        return self._env.tasks(name, self._seed)

    def call(self, name: str) -> str:
        """Return the call that `split` makes, for messages."""
        return f"{self._env.__name__}.tasks({name!r}, {self._seed})"


class NoTasks(TaskSet):
    """An empty taskset, for evaluations whose sets all have files."""

    def split(self, name: str) -> Sequence[Task]:
        """Return an empty sequence."""
        return ()


def read_split(tasks: TaskSet, name: str, key: str) -> Sequence[Task]:
    """Return the tasks of a split.

    Args:
        tasks: the configured taskset.
        name: of the split.
        key: the configuration key that holds ``name``, for messages.

    Raises:
        UnknownNameError: the taskset knows no such split.
        ConfigError: ``split`` or ``tasks`` raises or does not return tasks, or two tasks have one id and so would be one
            group. Ids of tasks that are made on access are compared when `TaskOrder` takes them.

    """
    call = tasks.call(name) if isinstance(tasks, EnvTasks) else f"{type(tasks).__name__}.split({name!r})"
    try:
        found = tasks.split(name)
    except AgentrlError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{key}={name}: {call} raised {describe(error)}; it must return the tasks of the split, or () if it has none. "
            f"{key} names another split"
        ) from error
    if isinstance(found, MadeTasks):
        return found
    fits = hasattr(found, "__len__") and hasattr(found, "__getitem__") and not isinstance(found, str | Mapping)
    if not fits or (wrong := [task for task in found if not isinstance(task, Task)]):
        what = f"one with {wrong[0]!r:.100} in it" if fits else f"{found!r:.100}"
        raise ConfigError(f"{key}={name}: {call} must return a sequence of Tasks, it returned {what}")
    places: dict[str, list[int]] = {}
    for number, task in enumerate(found):
        places.setdefault(task.id, []).append(number)
    if len(places) < len(found):
        raise same_ids(call, {name: numbers for name, numbers in places.items() if len(numbers) > 1})
    return found


def same_ids(source: str, places: Mapping[str, Sequence[int]]) -> ConfigError:
    """Return the error for ids that several tasks have, with the numbers of these tasks."""
    named = [f"{name!r} (tasks {', '.join(map(str, numbers))})" for name, numbers in islice(places.items(), _NAMED)]
    more = f" and {len(places) - _NAMED} others" if len(places) > _NAMED else ""
    return ConfigError(
        f"{source} gives several tasks one id: {', '.join(named)}{more}. Episodes are grouped by the task's id, so each "
        "Task needs its own"
    )


class TaskOrder(DataSource):
    """Every task once an epoch, in a new permutation each: a pure function of seed and position (``shuffled``)."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        super().__init__(tasks, seed)
        assert len(tasks) > 0, "preflight refuses empty splits"
        self._position = 0
        """Tasks taken since the run's start."""
        self._taken: dict[str, int] = {}
        self._epoch = -1
        self._permutation = np.empty(0, np.int64)

    def get_samples(self, num_samples: int) -> list[Task]:
        """Return the next tasks.

        Raises:
            ConfigError: another task had the id of one.

        """
        return [self._take() for _ in range(num_samples)]

    def _take(self) -> Task:
        epoch, index = divmod(self._position, len(self.tasks))
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = np.random.default_rng([self.seed, epoch]).permutation(len(self.tasks))
        number = int(self._permutation[index])
        task = self.tasks[number]
        if (other := self._taken.setdefault(task.id, number)) != number:
            raise same_ids("the taskset", {task.id: sorted((other, number))})
        self._position += 1
        return task

    def state(self) -> dict[str, Any]:
        """Return the position."""
        return {"position": self._position}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on at a position."""
        self._position = state["position"]


def episode_seed(run_seed: int, *parts: str | int) -> int:
    """Return a seed for one episode from the run's seed and the episode's identifiers; equal in every process."""
    return zlib.crc32("/".join(str(part) for part in (run_seed, *parts)).encode()) & 0x7FFFFFFF
