"""The data buffer: tasks that were taken from the data source by position, and tasks that were given back."""

from __future__ import annotations

import threading
from collections.abc import Collection, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from agentrl.config.rollout import RolloutConfig
from agentrl.core.data_source import BufferFilter, DataSource, take_first
from agentrl.core.errors import ConfigError
from agentrl.core.imports import load_function
from agentrl.core.task import Task, task_from_dict, task_to_dict
from agentrl.core.user_code import calling


def load_buffer_filter(rollout: RolloutConfig) -> BufferFilter:
    """Return the function that ``rollout.buffer_filter`` names.

    Raises:
        ConfigError: it does not exist, or is no function of two arguments.
    """
    reference, key = rollout.buffer_filter, "rollout.buffer_filter"
    if reference is None:
        return take_first
    return load_function(reference, key, "buffer", "num_samples")


@dataclass(frozen=True, slots=True)
class Epochs:
    """How often a run goes through its tasks, such as ``Epochs(tasks=7473, count=2.0)``."""

    tasks: int
    """Number of tasks to train on."""
    count: float
    """``train.epochs``."""

    @property
    def limit(self) -> int:
        """Most tasks that are taken from the data source."""
        return int(Fraction(str(self.count)) * self.tasks)


class DataBuffer:
    """The tasks of a run by position: position ``i`` has the ``i``-th task that was taken.

    A task is taken from the tasks that were given back, as ``buffer_filter`` chooses, and else from the data source. The
    tasks of untrained positions are kept, and are part of the state: a resumed run has them at the same positions.

    Args:
        data_source: of new tasks.
        buffer_filter: chooses among the tasks that were given back.
        key: the configuration key of ``buffer_filter`` with its value, for messages.
        epochs: how often the tasks are gone through; None: without end.
    """

    def __init__(
        self,
        data_source: DataSource,
        buffer_filter: BufferFilter = take_first,
        key: str = "rollout.buffer_filter",
        epochs: Epochs | None = None,
    ) -> None:
        self.data_source = data_source
        self.epochs = epochs
        self._filter = buffer_filter
        self._key = key
        self._next = 0
        """The first position without a task."""
        self._drawn = 0
        """Tasks that were taken from the data source."""
        self._taken: dict[int, Task] = {}
        """Tasks of untrained positions."""
        self._buffer: list[Task] = []
        """Tasks that were given back, the oldest first."""
        self._again: set[str] = set()
        """Ids of lost tasks that were given back, until they have a result."""
        self._lock = threading.Lock()

    def has_task(self, position: int) -> bool:
        """Return whether there is a task for ``position``: not if the epochs end before it."""
        if self.epochs is None:
            return True
        return position < self._next + self.epochs.limit - self._drawn + len(self._buffer)

    @property
    def untrained(self) -> int | None:
        """Number of tasks that no step has trained and no filter dropped, those in progress included; None: without end."""
        if self.epochs is None:
            return None
        return self.epochs.limit - self._drawn + len(self._buffer) + len(self._taken)

    def __getitem__(self, position: int) -> Task:
        """Return the task at ``position``. Tasks are taken up to it.

        Raises:
            ConfigError: the data source or the filter raises, or returns something else than tasks.
        """
        with self._lock:
            if position >= self._next:
                for task in self._get(position + 1 - self._next):
                    self._taken[self._next] = task
                    self._next += 1
            return self._taken[position]

    def draw(self, count: int) -> None:
        """Take tasks one at a time, until ``count`` positions have one, as a run did before it was resumed.

        Raises:
            ConfigError: see `__getitem__`.
        """
        for position in range(self._next, count):
            self[position]

    def add_samples(self, tasks: Sequence[Task]) -> None:
        """Give tasks back, to be taken again at new positions."""
        with self._lock:
            self._buffer += tasks

    def on_trained(
        self, trained: Container[int], rewards: Mapping[str, Sequence[float]], lost: Collection[str] = ()
    ) -> None:
        """Record the results of a training step.

        Args:
            trained: positions whose tasks are done.
            rewards: for the data source; see `DataSource.on_trained`.
            lost: ids of tasks without a result. They are given back, unless they were already and are lost again.
        """
        with self._lock:
            done = [position for position in self._taken if position in trained]
            tasks = [self._taken.pop(position) for position in done]
            self._again -= rewards.keys()
            self._buffer += [task for task in tasks if task.id in lost and task.id not in self._again]
            self._again ^= set(lost)
            with _calling(self.data_source, "on_trained"):
                self.data_source.on_trained(rewards)

    def _get(self, count: int) -> list[Task]:
        """Return the next tasks: first those that were given back."""
        tasks = self._from_buffer(count) if self._buffer else []
        if len(tasks) < count:
            new_tasks = get_tasks(self.data_source, count - len(tasks))
            self._drawn += len(new_tasks)
            tasks += new_tasks
        return tasks

    def _from_buffer(self, count: int) -> list[Task]:
        with calling(self._key):
            tasks = list(self._filter(tuple(self._buffer), count))
        buffer = list(self._buffer)
        for task in tasks:
            if task not in buffer:
                raise ConfigError(
                    f"{self._key} returned {task!r:.100}, which is not in the buffer, or was returned twice"
                )
            buffer.remove(task)
        if len(tasks) > count:
            raise ConfigError(f"{self._key} returned {len(tasks)} tasks; it may return {count} at most")
        self._buffer = buffer
        return tasks

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, JSON-able.

        Raises:
            ConfigError: a task holds what JSON cannot, or the data source raises.
        """
        with self._lock:
            with _calling(self.data_source, "state"):
                source = deepcopy(self.data_source.state())  # is written to disk while tasks are taken
            return {
                "next": self._next,
                "drawn": self._drawn,
                "taken": {str(position): task_to_dict(task) for position, task in self._taken.items()},
                "buffer": [task_to_dict(task) for task in self._buffer],
                "again": sorted(self._again),
                "source": source,
            }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the return value of `state`."""
        with self._lock:
            self._next = state["next"]
            self._drawn = state.get("drawn", self._next)
            self._taken = {int(position): task_from_dict(task) for position, task in state["taken"].items()}
            self._buffer = [task_from_dict(task) for task in state["buffer"]]
            self._again = set(state["again"])
            with _calling(self.data_source, "load_state"):
                self.data_source.load_state(state["source"])

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the data source, the number of tasks that were given back and not taken again, and the epoch."""
        epoch = {} if self.epochs is None else {"data/epoch": self._drawn / self.epochs.tasks}
        with self._lock, _calling(self.data_source, "metrics"):
            return {"data/buffer": float(len(self._buffer)), **epoch, **self.data_source.metrics()}


def _calling(data_source: DataSource, method: str) -> AbstractContextManager[None]:
    """Turn what a data source raises in the body into a `ConfigError` with the author's line."""
    return calling(f"tasks.data_source: {type(data_source).__name__}.{method}")


def get_tasks(data_source: DataSource, count: int) -> list[Task]:
    """Return the next tasks of a data source.

    Raises:
        ConfigError: it raises, or returns something else than so many tasks.
    """
    call = f"tasks.data_source: {type(data_source).__name__}.get_samples({count})"
    with _calling(data_source, "get_samples"):
        tasks = data_source.get_samples(count)
    if not isinstance(tasks, Sequence) or len(tasks) != count or not all(isinstance(task, Task) for task in tasks):
        raise ConfigError(f"{call} must return a sequence of {count} Tasks, it returned {tasks!r:.100}")
    return list(tasks)
