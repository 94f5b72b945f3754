"""From a step's rollouts to a batch, and to figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from agentrl.algo.registry import make_algorithm
from agentrl.batch.groups import RolloutGroups
from agentrl.batch.microbatch import GlobalBatch
from agentrl.batch.packing import pack
from agentrl.config.schema import Config
from agentrl.core.types import Rollout, Row
from agentrl.evaluation.intervals import mean
from agentrl.evaluation.metrics import rollout_means

COUNTS = {
    "batch/rows",
    "batch/tokens",
    "batch/trained_tokens",
    "batch/micro_batches",
    "train/trained_tokens",
    "train/provenance_faults",
}
"""Figures of an optimizer step that are added up over those of a step."""


def rollout_advantages(config: Config, groups: RolloutGroups) -> dict[str, float]:
    """Return the advantage of every rollout by its id."""
    rewards_N = torch.from_numpy(groups.rewards_N)
    advantages_N = make_algorithm(config.algo).advantages(rewards_N, torch.from_numpy(groups.groups_N))
    ids = (rollout.rollout_id for rollout in groups.rollouts_N)
    return dict(zip(ids, advantages_N.tolist(), strict=True))


def train_batches(
    config: Config, groups: RolloutGroups, advantages: Mapping[str, float], pad_id: int
) -> list[GlobalBatch]:
    """Return a batch for each of the ``train.steps_per_rollout`` optimizer steps that has anything to train on.

    Groups stay whole: each optimizer step gets as many of them as the others, or one more. Rollouts without an
    advantage, those of groups whose rewards are all equal among them, add nothing to the gradient and are left out, of
    the denominators too (DAPO's filter, arXiv:2503.14476, without sampling others in their place). Where the loss has a
    KL term or an entropy bonus they do add to it, and stay.
    """
    everything = config.algo.trains_everything
    shares = np.array_split(np.arange(len(groups.prompt_ids_G)), config.train.steps_per_rollout)
    batches = []
    for share in shares:
        chosen = np.isin(groups.groups_N, share)
        rollouts = [rollout for rollout, here in zip(groups.rollouts_N, chosen, strict=True) if here]
        kept = [rollout for rollout in rollouts if everything or advantages[rollout.rollout_id]]
        rows = [row for rollout in kept for row in rollout.rows if row.mask.any()]
        if rows:
            batches.append(_pack(config, rows, advantages, pad_id))
    return batches


def _pack(config: Config, rows: Sequence[Row], advantages: Mapping[str, float], pad_id: int) -> GlobalBatch:
    return pack(
        rows,
        advantages,
        ranks=config.learner.ranks,
        tokens_per_bin=config.batch.tokens_per_bin,
        tokens_per_micro=config.batch.tokens_per_micro,
        pad_id=pad_id,
        aggregation=config.batch.aggregation,
        temperature=config.sampler.temperature,
        provenance=config.train.provenance,
    )


def rollout_figures(rollouts: Sequence[Rollout], groups: RolloutGroups, sampled_s: float | None) -> dict[str, float]:
    """Return a step's figures: reward, environment metrics, sizes, how episodes ended.

    ``sampled_s`` are the seconds that sampling them all took; None where they were not sampled now.
    """
    sampled = sum(rollout.sampled_tokens for rollout in rollouts)
    figures = {
        "train/reward": mean([rollout.reward for rollout in groups.rollouts_N]),
        "train/flat_groups": groups.flat_share,
        "rollout/episodes": float(len(rollouts)),
        "rollout/dropped": float(groups.dropped),
        "rollout/turns": mean([float(len(rollout.turns)) for rollout in rollouts]),
        "rollout/sampled_tokens": float(sampled),
    }
    if sampled_s is not None:
        figures |= {"time/tokens_per_s": sampled / max(sampled_s, 1e-6), **_tool_figures(rollouts)}
    for rollout in rollouts:
        key = f"rollout/stop/{rollout.stop_reason.value}"
        figures[key] = figures.get(key, 0.0) + 1 / len(rollouts)
    return figures | {f"rollout/{key}": value for key, value in rollout_means(rollouts).items()}


def _tool_figures(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the seconds in calls of tools, added up over episodes that run at the same time, and their share of those."""
    tools_s = sum(rollout.tool_seconds for rollout in rollouts)
    return {"time/tools_s": tools_s, "time/tools_share": tools_s / max(sum(one.seconds for one in rollouts), 1e-6)}


def merge_figures(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the figures of one or several optimizer steps as those of one step.

    Counts are added, of maxima the largest is taken, of the learning rate the last; the rest is averaged.
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
