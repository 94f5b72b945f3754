"""Metrics of a training step, from its rollouts and its optimizer steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from agentrl.algo.estimate import RowAdvantages
from agentrl.batch.groups import RolloutGroups, group_rollouts
from agentrl.core.task import source_of
from agentrl.core.types import Rollout
from agentrl.evaluation.intervals import mean
from agentrl.evaluation.metrics import rollout_means
from agentrl.train.optimizer_steps import live_share

COUNTS = {
    "batch/rows",
    "batch/tokens",
    "batch/trained_tokens",
    "batch/micro_batches",
    "train/trained_tokens",
    "train/provenance_faults",
    "train/nonfinite_gradients",
}
"""Metrics of an optimizer step that are summed over the optimizer steps of a training step."""


def rollout_metrics(rollouts: Sequence[Rollout], groups: RolloutGroups, sampled_s: float | None) -> dict[str, float]:
    """Return a step's rollout metrics: reward, environment metrics, sizes, stop reasons.

    ``sampled_s`` are the seconds that sampling all of them took; None if they were recorded earlier.
    """
    sampled = sum(rollout.sampled_tokens for rollout in rollouts)
    metrics = {
        "train/reward": mean([rollout.reward for rollout in groups.rollouts_N]),
        "train/flat_groups": groups.flat_share,
        "rollout/episodes": float(len(rollouts)),
        "rollout/dropped": float(groups.dropped),
        "rollout/turns": mean([float(len(rollout.turns)) for rollout in rollouts]),
        "rollout/sampled_tokens": float(sampled),
    }
    if sampled_s is not None:
        metrics |= {"time/tokens_per_s": sampled / max(sampled_s, 1e-6), **_tool_metrics(rollouts)}
    for rollout in rollouts:
        key = f"rollout/stop/{rollout.stop_reason.value}"
        metrics[key] = metrics.get(key, 0.0) + 1 / len(rollouts)
    metrics |= {f"rollout/{key}": value for key, value in rollout_means(rollouts).items()}
    return metrics | _role_metrics(rollouts)


def _role_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return reward, turns and environment metrics by role; empty with fewer than two roles."""
    by_role: dict[str, list[Rollout]] = {}
    for one in rollouts:
        by_role.setdefault(one.role, []).append(one)
    metrics: dict[str, float] = {}
    for role, some in sorted(by_role.items()) if len(by_role) > 1 else ():
        if kept := [one.reward for one in some if not one.dropped]:
            metrics[f"train/reward/role={role}"] = mean(kept)
        metrics[f"rollout/turns/role={role}"] = mean([float(len(one.turns)) for one in some])
        metrics |= {f"rollout/{key}/role={role}": value for key, value in rollout_means(some).items()}
    return metrics


def policy_metrics(policies: Sequence[str], steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the learner's metrics of each policy of several, such as ``train/grad_norm/policy=first``.

    Args:
        policies: that each optimizer step trained.
        steps: metrics of the optimizer steps.

    """
    metrics: dict[str, float] = {}
    names = sorted(set(policies))
    for name in names if len(names) > 1 else ():
        own = merge_metrics([step for policy, step in zip(policies, steps, strict=True) if policy == name])
        metrics |= {f"{key}/policy={name}": value for key, value in own.items() if key.startswith("train/")}
    return metrics


def source_metrics(
    sources: Collection[str], rollouts: Sequence[Rollout], groups: RolloutGroups, advantages: RowAdvantages
) -> dict[str, float]:
    """Return the metrics of each source of a mixed run that has rollouts in the step, such as ``train/NAME/reward``."""
    metrics: dict[str, float] = {}
    for name in sources:
        some = [rollout for rollout in rollouts if source_of(rollout.prompt_id) == name]
        part = group_rollouts(some)
        own = {key: values for key, values in advantages.items() if source_of(key.prompt_id) == name}
        found = rollout_metrics(some, part, None) | {"batch/live_share": live_share(part, own)} if some else {}
        for key, value in found.items():
            section, _, rest = key.partition("/")
            metrics[f"{section}/{name}/{rest}"] = value
    return metrics


def _tool_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the seconds in tool calls, summed over concurrent episodes, and their share of the episodes' seconds."""
    tools_s = sum(rollout.tool_seconds for rollout in rollouts)
    return {"time/tools_s": tools_s, "time/tools_share": tools_s / max(sum(one.seconds for one in rollouts), 1e-6)}


def merge_metrics(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of one or several optimizer steps as those of one training step.

    Counts are summed, of maxima the largest is taken, of the learning rate the last; the rest is averaged.
    """
    merged = {"train/optimizer_steps": float(len(steps))}
    for key in dict.fromkeys(key for step in steps for key in step):
        values = [step[key] for step in steps if key in step]
        if key in COUNTS:
            merged[key] = sum(values)
        elif key.endswith("_max"):
            merged[key] = max(values)
        else:
            merged[key] = values[-1] if key == "train/lr" else mean(values)
    return merged
