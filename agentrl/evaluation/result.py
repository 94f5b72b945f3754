"""What an evaluation gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.core.types import Rollout
from agentrl.evaluation.metrics import Figures, flat, nested
from agentrl.evaluation.sets import TaskChoice


@dataclass(frozen=True, slots=True)
class SetResult:
    """One set, evaluated."""

    choice: TaskChoice
    """The tasks, and how they were sampled."""
    figures: Figures
    """What came of it."""
    rollouts: Sequence[Rollout]
    """The samples, those of a task side by side."""


def flat_figures(results: Sequence[SetResult]) -> dict[str, float]:
    """Return all figures as metrics: ``eval/<figure>``, or ``eval/<set>/<figure>`` where the configuration names sets."""
    return {key: value for result in results for key, value in flat(result.figures, result.choice.prefix).items()}


def report(results: Sequence[SetResult]) -> dict[str, object]:
    """Return, by set, how it was sampled and all figures, JSON-able; the set without a name is ``eval``."""
    return {
        result.choice.label: {
            "source": result.choice.source,
            "sampling": result.choice.plan.model_dump(mode="json", exclude={"split", "path", "size", "sets"}),
            **nested(result.figures),
        }
        for result in results
    }
