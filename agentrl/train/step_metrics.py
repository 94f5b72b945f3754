"""Metrics of a training step, from its rollouts and its optimizer steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from agentrl.batch.groups import RolloutGroups, group_rollouts
from agentrl.batch.sequences import RowValues, group_sequences
from agentrl.core.task import task_source_name
from agentrl.core.types import FinishReason, Rollout
from agentrl.evaluation.intervals import mean
from agentrl.evaluation.metrics import rollout_means

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
_VALUE_METRICS = ("loss", "mean", "clip_fraction", "grad_norm", "lr", "nonfinite_gradients")
"""Metrics of the critic's optimizer steps that are logged, as ``train/value_…``."""


def rollout_metrics(rollouts: Sequence[Rollout], groups: RolloutGroups, sampled_s: float | None) -> dict[str, float]:
    """Return a step's rollout metrics: reward, environment metrics, sizes, stop reasons, reasons of forks.

    ``sampled_s`` are the seconds that sampling all of them took; None if they were recorded earlier.
    """
    sampled = sum(rollout.sampled_tokens for rollout in rollouts)
    metrics = {
        "train/reward": mean([rollout.reward for rollout in groups.rollouts_N]),
        "train/flat_groups": groups.flat_share,
        "rollout/episodes": float(len(rollouts)),
        "rollout/dropped": float(groups.dropped),
        "rollout/turns": mean([float(len(rollout.turns)) for rollout in rollouts]),
        "rollout/cut_turns": _cut_turns(rollouts),
        "rollout/sampled_tokens": float(sampled),
    }
    if sampled_s is not None:
        metrics |= {"time/tokens_per_s": sampled / max(sampled_s, 1e-6), **_tool_metrics(rollouts)}
    for rollout in rollouts:
        key = f"rollout/stop/{rollout.stop_reason.value}"
        metrics[key] = metrics.get(key, 0.0) + 1 / len(rollouts)
        for row in rollout.rows:
            if row.fork is not None:
                key = f"rollout/forks/{row.fork.value}"
                metrics[key] = metrics.get(key, 0.0) + 1 / len(rollouts)
    metrics |= {f"rollout/{key}": value for key, value in rollout_means(rollouts).items()}
    return metrics | _reward_metrics(rollouts) | _role_metrics(rollouts)


def _reward_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return mean and standard deviation of each of several rewards, and the share of rollouts in which it failed."""
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for rollout in rollouts for name in rollout.rewards):
        values = [rollout.rewards[name].value for rollout in rollouts if name in rollout.rewards]
        numbers = [value for value in values if value is not None]
        metrics[f"reward/{name}/failed"] = 1 - len(numbers) / len(values)
        if numbers:
            metrics |= {f"reward/{name}/mean": mean(numbers), f"reward/{name}/std": float(np.std(numbers))}
    return metrics


def _role_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return reward, turns and environment metrics by role; empty with fewer than two roles."""
    by_role: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        by_role.setdefault(rollout.role, []).append(rollout)
    metrics: dict[str, float] = {}
    for role, role_rollouts in sorted(by_role.items()) if len(by_role) > 1 else ():
        if rewards := [rollout.reward for rollout in role_rollouts if not rollout.dropped]:
            metrics[f"train/reward/role={role}"] = mean(rewards)
        metrics[f"rollout/turns/role={role}"] = mean([float(len(rollout.turns)) for rollout in role_rollouts])
        metrics |= {f"rollout/{key}/role={role}": value for key, value in rollout_means(role_rollouts).items()}
    return metrics


def policy_metrics(policies: Sequence[str], steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the learner's metrics of each policy of several, such as ``train/grad_norm/policy=first``."""
    metrics: dict[str, float] = {}
    names = sorted(set(policies))
    for name in names if len(names) > 1 else ():
        policy_means = merge_metrics([step for policy, step in zip(policies, steps, strict=True) if policy == name])
        metrics |= {f"{key}/policy={name}": value for key, value in policy_means.items() if key.startswith("train/")}
    return metrics


def source_metrics(sources: Collection[str], rollouts: Sequence[Rollout], advantages: RowValues) -> dict[str, float]:
    """Return the metrics of each source of a mixed run that has rollouts in the step, such as ``train/NAME/reward``."""
    metrics: dict[str, float] = {}
    for source in sources:
        source_rollouts = [rollout for rollout in rollouts if task_source_name(rollout.prompt_id) == source]
        if not source_rollouts:
            continue
        groups = group_rollouts(source_rollouts)
        source_advantages = {
            key: values for key, values in advantages.items() if task_source_name(key.prompt_id) == source
        }
        step_metrics = rollout_metrics(source_rollouts, groups, None)
        step_metrics["batch/live_share"] = live_share(groups, source_advantages)
        for key, value in step_metrics.items():
            section, _, name = key.partition("/")
            metrics[f"{section}/{source}/{name}"] = value
    return metrics


def live_share(groups: RolloutGroups, advantages: RowValues) -> float:
    """Return the share of the step's sampled tokens that have an advantage."""
    sampled = sum(sequence.size for sequence in group_sequences(groups.rows))
    return sum(int((advantages_T != 0).sum()) for advantages_T in advantages.values()) / max(1, sampled)


def taught_groups(advantages: RowValues, groups: RolloutGroups, filtered: Collection[str]) -> float:
    """Return the share of a step's groups that have an advantage, among all that were sampled for it.

    Args:
        advantages: of the step's trained tokens.
        groups: of the step.
        filtered: task ids of the groups that ``rollout.filter_groups`` dropped.
    """
    taught = {key.prompt_id for key, advantages_T in advantages.items() if advantages_T.any()}
    return len(taught) / max(1, len(groups.prompt_ids_G) + len(filtered))


def value_metrics(
    optimizer_steps: Sequence[Mapping[str, float]], groups: RolloutGroups, values: RowValues, returns: RowValues
) -> dict[str, float]:
    """Return the critic's metrics of a training step.

    The explained variance is ``1 - Var(R - V) / Var(R)`` over all trained tokens; it is left out if all returns are equal.

    Args:
        optimizer_steps: metrics of the critic's optimizer steps.
        groups: rollouts of the step.
        values: of the critic before its first optimizer step.
        returns: that it learns to predict.
    """
    merged = merge_metrics(optimizer_steps)
    metrics = {f"train/value_{name}": merged[f"train/{name}"] for name in _VALUE_METRICS if f"train/{name}" in merged}
    sequences = group_sequences(row for row in groups.rows if row.key in returns)
    returns_S, values_S = (
        np.concatenate([np.zeros(0), *(sequence.gather(signal) for sequence in sequences)])
        for signal in (returns, values)
    )
    if len(returns_S) and np.ptp(returns_S):
        metrics["train/value_explained_variance"] = float(1 - np.var(returns_S - values_S) / np.var(returns_S))
    return metrics


def _cut_turns(rollouts: Sequence[Rollout]) -> float:
    """Return the share of turns that ``sampler.max_new_tokens`` or a limit of the episode's tokens cut."""
    reasons = [turn.finish_reason for rollout in rollouts for turn in rollout.turns]
    return reasons.count(FinishReason.LENGTH) / max(1, len(reasons))


def _tool_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the seconds in tool calls, summed over concurrent episodes, their share of the episodes' seconds, and the
    calls of each tool.
    """
    tools_s = sum(rollout.tool_seconds for rollout in rollouts)
    metrics = {
        "time/tools_s": tools_s,
        "time/tools_share": tools_s / max(sum(rollout.seconds for rollout in rollouts), 1e-6),
    }
    for name in sorted({name for rollout in rollouts for name in rollout.tool_uses}):
        uses = [rollout.tool_uses[name] for rollout in rollouts if name in rollout.tool_uses]
        calls = sum(use.calls for use in uses)
        metrics[f"tool/{name}/calls"] = float(calls)
        metrics[f"tool/{name}/failed_share"] = sum(use.failed for use in uses) / calls
        metrics[f"tool/{name}/seconds"] = sum(use.seconds for use in uses) / calls
    return metrics


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
