"""Evaluation figures from rollouts."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.types import Rollout


def mean(values: Sequence[float]) -> float:
    """Return the mean, 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def rollout_means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of every environment metric over the rollouts that have it."""
    keys = sorted({key for rollout in rollouts for key in rollout.metrics})
    return {key: mean([rollout.metrics[key] for rollout in rollouts if key in rollout.metrics]) for key in keys}


def eval_figures(rollouts: Sequence[Rollout], by: str | None) -> dict[str, float]:
    """Return ``eval/…`` figures, and by each value of the metadata key ``by`` the reward and exact match."""
    figures = {"eval/reward": mean([rollout.reward for rollout in rollouts]), "eval/episodes": float(len(rollouts))}
    figures["eval/failed"] = mean([float(rollout.failure is not None) for rollout in rollouts])
    figures |= {f"eval/{key}": value for key, value in rollout_means(rollouts).items()}
    if by is None:
        return figures
    for value in sorted({str(rollout.metadata.get(by)) for rollout in rollouts}):
        some = [rollout for rollout in rollouts if str(rollout.metadata.get(by)) == value]
        figures[f"eval/reward/{by}={value}"] = mean([rollout.reward for rollout in some])
        if any("exact_match" in rollout.metrics for rollout in some):
            figures[f"eval/exact_match/{by}={value}"] = rollout_means(some)["exact_match"]
    return figures
