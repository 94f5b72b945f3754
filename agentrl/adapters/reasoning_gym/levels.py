"""A data source that raises the levels of reasoning-gym's curricula by the success of the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from typing_extensions import override

from agentrl.adapters.reasoning_gym.library import makers
from agentrl.adapters.reasoning_gym.tasks import ReasoningGymTasks
from agentrl.core.data_source import DataSource
from agentrl.core.errors import ConfigError
from agentrl.core.task import Task

_KEY = "tasks.data_source.options"


class LevelCurriculum(DataSource):
    """Begins each dataset at a level of its curriculum, and goes up or down a level by the mean score of groups at its level.

    Tasks come in a new permutation each epoch. Datasets without a curriculum stay as they are.

    Args:
        tasks: of the environment ``reasoning_gym``.
        seed: see `DataSource`.
        start: the first level, from 0.
        raise_at: the mean score from which the level goes up.
        lower_at: the mean score up to which it goes down; negative: never.
        groups: number of groups of a dataset, at its level, whose scores are averaged; afterwards they are forgotten.
        max_level: the highest level; None: the last that the curriculum has.

    Raises:
        ConfigError: the tasks are of another environment, no dataset has a curriculum, or an option is out of range.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        seed: int,
        start: int = 0,
        raise_at: float = 0.8,
        lower_at: float = 0.2,
        groups: int = 32,
        max_level: int | None = None,
    ) -> None:
        super().__init__(tasks, seed)
        if not isinstance(tasks, ReasoningGymTasks):
            raise ConfigError("tasks.data_source.name=LevelCurriculum is for env.name=reasoning_gym alone")
        if not lower_at < raise_at:
            raise ConfigError(f"{_KEY}.lower_at={lower_at} must be less than {_KEY}.raise_at={raise_at}")
        if groups < 1:
            raise ConfigError(f"{_KEY}.groups={groups} must be at least 1")
        self._raise_at, self._lower_at, self._groups = raise_at, lower_at, groups
        self._top: dict[str, int] = {}
        for source in tasks.sources:
            if levels := makers().call(int, "count_levels", dataset=source.name):
                self._top[source.name] = levels - 1 if max_level is None else min(max_level, levels - 1)
        if not self._top:
            raise ConfigError(f"no dataset of the run has a curriculum: {', '.join(s.name for s in tasks.sources)}")
        if not 0 <= start <= max(self._top.values()):
            raise ConfigError(f"{_KEY}.start={start} must be a level from 0 to {max(self._top.values())}")
        self._levels = {name: min(start, top) for name, top in self._top.items()}
        self._scores: dict[str, list[float]] = {name: [] for name in self._top}
        """Mean scores of the groups at the level of each dataset."""
        self._position = 0
        self._made = tasks
        self._set_levels()

    def _set_levels(self) -> None:
        assert isinstance(self.tasks, ReasoningGymTasks), "the constructor has checked it"
        self._made = self.tasks.at_levels(self._levels)
        self._made.check()

    @override
    def get_samples(self, num_samples: int) -> list[Task]:
        tasks = []
        for position in range(self._position, self._position + num_samples):
            epoch, index = divmod(position, len(self.tasks))
            if not index or position == self._position:
                permutation = np.random.default_rng([self.seed, epoch]).permutation(len(self.tasks))
            tasks.append(self._made[int(permutation[index])])
        self._position += num_samples
        return tasks

    @override
    def on_trained(self, rewards: Mapping[str, Sequence[float]]) -> None:
        for task_id, scores in rewards.items():
            *_, dataset, level, _ = task_id.split("/")
            if dataset in self._levels and level == f"level-{self._levels[dataset]}":
                self._scores[dataset].append(fmean(scores))
        changed = [self._move(name) for name, scores in self._scores.items() if len(scores) >= self._groups]
        if any(changed):
            self._set_levels()

    def _move(self, dataset: str) -> bool:
        """Move a dataset by the mean of its scores, which are forgotten; return whether its level has changed."""
        mean, level = fmean(self._scores[dataset]), self._levels[dataset]
        self._scores[dataset] = []
        step = int(mean >= self._raise_at) - int(mean <= self._lower_at)
        self._levels[dataset] = min(max(level + step, 0), self._top[dataset])
        return self._levels[dataset] != level

    @override
    def state(self) -> dict[str, object]:
        return {"position": self._position, "levels": dict(self._levels), "scores": {**self._scores}}

    @override
    def load_state(self, state: Mapping[str, Any]) -> None:
        self._position = state["position"]
        self._levels = dict(state["levels"])
        self._scores = {name: list(scores) for name, scores in state["scores"].items()}
        self._set_levels()

    @override
    def metrics(self) -> dict[str, float]:
        """Return the level of each dataset, as ``data/level/NAME``."""
        return {f"data/level/{name}": float(level) for name, level in self._levels.items()}
