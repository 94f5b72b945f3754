"""The contract of data sources, which choose the tasks of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.core.task import Task


class DataSource(ABC):
    """Chooses the tasks of a run, in the order in which their groups begin; ``tasks.data_source`` names one.

    It is built once a run. Its choice is a function of its tasks, the seed, its options and the results so far. It draws
    random numbers from generators that it seeds itself. Calls come from several threads, one at a time.

    Args:
        tasks: of ``tasks.train_split``, at least one. In a mixed run those of one source, whose name begins their ids.
        seed: ``run.seed``.

    Keyword arguments of a subclass are ``tasks.data_source.options``.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self.tasks = tasks
        self.seed = seed

    @abstractmethod
    def get_samples(self, num_samples: int) -> Sequence[Task]:
        """Return the next ``num_samples`` tasks. Each becomes a group of ``rollout.n_samples_per_prompt`` episodes."""

    def on_trained(self, rewards: Mapping[str, Sequence[float]]) -> None:  # noqa: B027 most sources need no results
        """Record the results of a training step: by task id, the rewards of the rollouts that did not fail, at least one.

        Those of groups that ``rollout.filter_groups`` dropped are included.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to continue, JSON-able. It is written to each checkpoint."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the return value of `state`. It is called before `get_samples`."""

    def metrics(self) -> dict[str, float]:
        """Return metrics for the row of a step, such as ``data/difficulty``."""
        return {}

    def close(self) -> None:  # noqa: B027 most sources hold nothing
        """Free what the data source holds, such as processes. It is called at the end of the run, also during another call."""


BufferFilter = Callable[[Sequence[Task], int], Sequence[Task]]
"""``rollout.buffer_filter``: gets the tasks of the buffer, the oldest first, and how many may be taken. It returns those
to take."""


def take_first(buffer: Sequence[Task], num_samples: int) -> Sequence[Task]:
    """Return the oldest tasks: first in, first out."""
    return buffer[:num_samples]
