"""Tasks of a run by source: a mixed run has several sources, any other has one, named ``""``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import Literal

from agentrl.config.schema import Config
from agentrl.core.errors import UserError
from agentrl.core.task import MadeTasks, Task, TaskSet, task_id
from agentrl.runtime.task_order import TaskOrder, read_split

TaskSources = Mapping[str, TaskSet]
"""The taskset of each source, by name, in the order of ``sources``."""


@contextmanager
def of_source(source: str) -> Iterator[None]:
    """Put the source's section before the message of an error of the user."""
    try:
        yield
    except UserError as error:
        if not source:
            raise
        raise type(error)("\n".join(f"sources.{source}: {line}" for line in str(error).splitlines())) from error


class _OfSource(MadeTasks):
    """Tasks whose ids begin with the source's name."""

    def __init__(self, source: str, tasks: Sequence[Task]) -> None:
        super().__init__(source, len(tasks))
        self._tasks = tasks

    def make(self, index: int) -> Task:
        """Return a task under its id in the run."""
        task = self._tasks[index]
        return replace(task, id=task_id(self.split, task.id))


def named(source: str, tasks: Sequence[Task]) -> Sequence[Task]:
    """Return tasks with the ids that they have in the run."""
    return _OfSource(source, tasks) if source else tasks


class MixedOrder:
    """An endless order over the tasks of several sources, in proportion to their weights.

    Every position belongs to one source: a function of the weights and the position alone. A source's tasks follow each
    other as in a `TaskOrder` of their own. So a resumed run goes on with the same tasks. Any stretch of positions, such as a
    step, has each source's share of it: exactly if all shares are whole numbers; of two sources within one task.

    Args:
        orders: of each source.
        weights: of each source, positive.

    """

    def __init__(self, orders: Mapping[str, TaskOrder], weights: Mapping[str, float]) -> None:
        exact = {name: Fraction(str(weights[name])) for name in orders}
        # The heaviest first: each source takes its share of the positions that those before it leave.
        self._names = sorted(orders, key=lambda name: -exact[name])
        left = [sum(exact[name] for name in self._names[start:]) for start in range(len(self._names))]
        self._shares = [exact[name] / rest for name, rest in zip(self._names, left, strict=True)]
        self._orders = orders

    def place(self, position: int) -> tuple[str, int]:
        """Return the source of a position, and how many of its tasks come before."""
        for name, share in zip(self._names, self._shares, strict=True):
            before, after = int(position * share), int((position + 1) * share)
            if after > before:
                return name, before
            position -= before
        raise AssertionError("the last source takes every position that is left")

    def __getitem__(self, position: int) -> Task:
        """Return the task at ``position`` since the run's start.

        Raises:
            ConfigError: another task of its source had its id.

        """
        name, index = self.place(position)
        return self._orders[name][index]

    def take(self, position: int, count: int) -> list[Task]:
        """Return ``count`` tasks from ``position`` on."""
        return [self[position + offset] for offset in range(count)]


def read_splits(
    config: Config, tasks: TaskSources, which: Literal["train", "eval"] = "train"
) -> dict[str, Sequence[Task]]:
    """Return the tasks of each source's ``tasks.train_split`` or ``tasks.eval_split``, under their ids in the run.

    Raises:
        UserError: as in `read_split`.

    """
    found = {}
    for name, each in config.by_source().items():
        with of_source(name):
            split = each.tasks.train_split if which == "train" else each.tasks.eval_split
            found[name] = named(name, read_split(tasks[name], split, f"tasks.{which}_split"))
    return found


def order_of(config: Config, splits: Mapping[str, Sequence[Task]]) -> TaskOrder | MixedOrder:
    """Return the order in which a run takes the tasks of `read_splits`."""
    orders = {name: TaskOrder(split, config.run.seed) for name, split in splits.items()}
    if not config.sources:
        return orders[""]
    return MixedOrder(orders, {name: source.weight for name, source in config.sources.items()})
