"""From a step's rollouts to a batch, and to figures."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentrl.algo import make_algorithm
from agentrl.batch.groups import RolloutGroups
from agentrl.batch.microbatch import GlobalBatch
from agentrl.batch.packing import pack
from agentrl.config.schema import Config
from agentrl.evaluation import mean, rollout_means
from agentrl.types import Rollout


def train_batch(config: Config, groups: RolloutGroups, pad_id: int) -> GlobalBatch | None:
    """Return the step's batch, or None where no rollout has an advantage.

    Rollouts without an advantage, those of groups whose rewards are all equal among them, add nothing to the gradient
    and are left out, of the denominators too (DAPO's filter, arXiv:2503.14476, without sampling others in their place).
    """
    rewards_N = torch.from_numpy(groups.rewards_N)
    advantages_N = make_algorithm(config.algo).advantages(rewards_N, torch.from_numpy(groups.groups_N))
    by_rollout = {
        rollout.rollout_id: advantage
        for rollout, advantage in zip(groups.rollouts_N, advantages_N.tolist(), strict=True)
        if advantage != 0.0
    }
    rows = [row for row in groups.rows if row.key.rollout_id in by_rollout and row.mask.any()]
    if not rows:
        return None
    return pack(
        rows,
        by_rollout,
        ranks=config.learner.workers,
        tokens_per_bin=config.batch.tokens_per_bin,
        tokens_per_micro=config.batch.tokens_per_micro,
        pad_id=pad_id,
        aggregation=config.batch.aggregation,
        temperature=config.sampler.temperature,
    )


def rollout_figures(rollouts: Sequence[Rollout], groups: RolloutGroups, rollout_s: float) -> dict[str, float]:
    """Return a step's figures: reward, environment metrics, sizes, and how episodes ended."""
    sampled = sum(rollout.sampled_tokens for rollout in rollouts)
    figures = {
        "train/reward": mean([rollout.reward for rollout in groups.rollouts_N]),
        "train/flat_groups": groups.flat_share,
        "rollout/episodes": float(len(rollouts)),
        "rollout/dropped": float(groups.dropped),
        "rollout/turns": mean([float(len(rollout.turns)) for rollout in rollouts]),
        "rollout/sampled_tokens": float(sampled),
        "time/tokens_per_s": sampled / max(rollout_s, 1e-6),
    }
    for rollout in rollouts:
        key = f"rollout/stop/{rollout.stop_reason.value}"
        figures[key] = figures.get(key, 0.0) + 1 / len(rollouts)
    return figures | {f"rollout/{key}": value for key, value in rollout_means(rollouts).items()}
