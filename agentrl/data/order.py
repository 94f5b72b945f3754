"""The order of tasks in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from agentrl.core.data_source import DataSource
from agentrl.core.errors import ConfigError
from agentrl.core.task import Task

_NAMED = 5
"""Ids in a message."""


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
        if (first := self._taken.setdefault(task.id, number)) != number:
            raise same_ids("the taskset", {task.id: sorted((first, number))})
        self._position += 1
        return task

    def state(self) -> dict[str, Any]:
        """Return the position."""
        return {"position": self._position}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on at a position."""
        self._position = state["position"]
