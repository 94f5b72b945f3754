"""The order of tasks in training: every task once an epoch, or drawn by success rates (a curriculum)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from math import exp
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
        assert len(tasks) > 0, "check_not_empty refuses empty splits"
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


RECENT = 0.5
"""Weight of a task's newest group in its success rate."""


class Curriculum(DataSource):
    """Prefers tasks whose success rate is near a target (``curriculum``).

    Tasks are drawn at random, with the weight ``floor + (1 - floor) * exp(-((rate - target) / width)**2 / 2)``. A task without
    a result has the weight 1. A task that was taken is drawn again after its result, or after as many draws as there are tasks.

    Args:
        tasks: see `DataSource`.
        seed: see `DataSource`.
        target: the preferred success rate. At 0.5 the rewards of a group differ most.
        width: at this distance from the target the weight is 0.6, at three times the distance almost ``floor``.
        floor: the weight of tasks that are much too easy or too hard, so that they are measured again.
        solved_at: a rollout succeeds with this reward or a higher one.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        seed: int,
        target: float = 0.5,
        width: float = 0.2,
        floor: float = 0.1,
        solved_at: float = 1.0,
    ) -> None:
        super().__init__(tasks, seed)
        key = "tasks.data_source.options"
        if not 0 <= target <= 1:
            raise ConfigError(f"{key}.target={target}: it must be a success rate from 0 to 1")
        if not width > 0:
            raise ConfigError(f"{key}.width={width}: it must be above 0")
        if not 0 < floor <= 1:
            raise ConfigError(
                f"{key}.floor={floor}: it must be above 0, so that each task is measured again, and at most 1"
            )
        self.target, self.width, self.floor, self.solved_at = target, width, floor, solved_at
        self._draws = 0
        self._numbers: dict[str, int] = {}
        """Numbers of the tasks that were taken, by id."""
        self._rates: dict[int, float] = {}
        """Success rates by number."""
        self._open: dict[int, int] = {}
        """Draws of the tasks that have had no result since, by number, the oldest first."""

    def get_samples(self, num_samples: int) -> list[Task]:
        """Return the next tasks.

        Raises:
            ConfigError: two tasks have one id.
        """
        return [self._draw() for _ in range(num_samples)]

    def _draw(self) -> Task:
        oldest = next(iter(self._open), None)
        if oldest is not None and self._open[oldest] <= self._draws - len(self.tasks):
            del self._open[oldest]
        rng = np.random.default_rng([self.seed, self._draws])
        number = int(rng.integers(len(self.tasks)))
        while number in self._open or rng.random() >= self._weight(number):
            number = int(rng.integers(len(self.tasks)))
        task = self.tasks[number]
        if (first := self._numbers.setdefault(task.id, number)) != number:
            raise same_ids("the taskset", {task.id: sorted((first, number))})
        self._open[number] = self._draws
        self._draws += 1
        return task

    def _weight(self, number: int) -> float:
        if number not in self._rates:
            return 1.0
        distance = (self._rates[number] - self.target) / self.width
        return self.floor + (1 - self.floor) * exp(-(distance**2) / 2)

    def on_trained(self, rewards: Mapping[str, Sequence[float]]) -> None:
        """Update the success rates of tasks."""
        for name, task_rewards in rewards.items():
            if (number := self._numbers.get(name)) is None:
                continue  # a task of before a resume with other data
            rate = sum(reward >= self.solved_at for reward in task_rewards) / len(task_rewards)
            previous_rate = self._rates.get(number, rate)
            self._rates[number] = previous_rate + RECENT * (rate - previous_rate)
            self._open.pop(number, None)

    def state(self) -> dict[str, Any]:
        """Return the draws, and what is known of each task."""
        tasks = {
            name: [number, self._rates.get(number), self._open.get(number)] for name, number in self._numbers.items()
        }
        return {"draws": self._draws, "tasks": tasks}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the return value of `state`, but for tasks that are not where they were: of a resume with other data."""
        size = len(self.tasks)
        tasks = {
            name: entry for name, entry in state["tasks"].items() if entry[0] < size and self.tasks[entry[0]].id == name
        }
        self._draws = state["draws"]
        self._numbers = {name: number for name, (number, _, _) in tasks.items()}
        self._rates = {number: rate for number, rate, _ in tasks.values() if rate is not None}
        drawn = [(draw, number) for number, _, draw in tasks.values() if draw is not None]
        self._open = {number: draw for draw, number in sorted(drawn)}

    def metrics(self) -> dict[str, float]:
        """Return the mean success rate, and the shares of tasks by difficulty."""
        rates = np.fromiter(self._rates.values(), np.float64)
        if not rates.size:
            return {"data/measured": 0.0}
        return {
            "data/measured": rates.size / len(self.tasks),
            "data/success_rate": float(rates.mean()),
            "data/unsolved": float((rates == 0).mean()),
            "data/near_target": float((abs(rates - self.target) <= self.width).mean()),
            "data/solved": float((rates == 1).mean()),
        }
