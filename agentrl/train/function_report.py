"""What functions of users are tried on, and what was seen of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from agentrl.batch.groups import RolloutGroups, group_rollouts
from agentrl.core.types import Rollout


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """What a training step of a run recorded."""

    folder: Path
    """Folder of the run."""
    step: int
    rollouts: Sequence[Rollout]
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the step; empty if they were not kept."""

    @property
    def groups(self) -> list[list[Rollout]]:
        """The rollouts of each task, copied so that a function may change fields of them."""
        by_task: dict[str, list[Rollout]] = {}
        for rollout in self.rollouts:
            by_task.setdefault(rollout.prompt_id, []).append(replace(rollout, metrics=dict(rollout.metrics)))
        return list(by_task.values())

    @property
    def trained(self) -> RolloutGroups:
        """The rollouts that were not dropped, by task."""
        return group_rollouts(rollout for group in self.groups for rollout in group)


@dataclass(slots=True)
class FunctionReport:
    """What was seen of one function."""

    key: str
    """The configuration key that names it."""
    reference: str
    """``module:function`` or ``file.py:function``."""
    lines: list[str] = field(default_factory=list)
    """What it returned, and how long it took."""
    faults: list[str] = field(default_factory=list)
    """What a run would end with, or what breaks the contract."""
    seconds: list[float] = field(default_factory=list)
    """Duration of each call."""

    def time(self, what: str) -> str:
        """Return the line on the time of its calls."""
        return f"{median(self.seconds):.3g} s {what} in the median, {max(self.seconds):.3g} s at most"
