"""Results of an evaluation, by set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.core.types import Rollout
from agentrl.evaluation.metrics import SetMetrics, flat, metrics_to_dict
from agentrl.evaluation.sets import EvalTasks


@dataclass(frozen=True, slots=True)
class SetResult:
    """The result of one set."""

    eval_set: EvalTasks
    """The tasks, and how they were sampled."""
    metrics: SetMetrics
    """Its metrics."""
    rollouts: Sequence[Rollout]
    """The samples, those of a task next to each other."""


def flat_metrics(results: Sequence[SetResult]) -> dict[str, float]:
    """Return the metrics of all sets: ``eval/<metric>``, or ``eval/<set>/<metric>`` if the configuration names sets."""
    return {key: value for result in results for key, value in flat(result.metrics, result.eval_set.prefix).items()}


def report(results: Sequence[SetResult]) -> dict[str, object]:
    """Return sampling parameters and metrics by set, JSON-able; the set without a name is ``eval``."""
    return {
        result.eval_set.label: {
            "source": result.eval_set.source,
            "sampling": result.eval_set.plan.model_dump(
                mode="json", exclude={"source", "split", "path", "size", "sets"}
            ),
            **metrics_to_dict(result.metrics),
        }
        for result in results
    }
