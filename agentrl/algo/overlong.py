"""Penalty for long rollouts."""

from __future__ import annotations

from dataclasses import replace

from agentrl.batch.groups import RolloutGroups
from agentrl.config.algo import OverlongConfig


def overlong_penalty(tokens: int, config: OverlongConfig) -> float:
    """Return what a rollout of so many sampled tokens loses.

    Source: DAPO, arXiv:2503.14476, equation 13: nothing up to ``max_tokens - buffer_tokens``, then linearly more up to
    ``penalty`` at ``max_tokens``, and not more beyond.
    """
    if config.max_tokens is None:
        return 0.0
    over = tokens - (config.max_tokens - config.buffer_tokens)
    return config.penalty * min(1.0, max(0.0, over / config.buffer_tokens))


def with_penalties(groups: RolloutGroups, config: OverlongConfig) -> RolloutGroups:
    """Return the groups with penalties taken off the rewards; the given rollouts stay as they are."""
    rollouts_N = tuple(
        replace(rollout, reward=rollout.reward - overlong_penalty(rollout.sampled_tokens, config))
        for rollout in groups.rollouts_N
    )
    return replace(groups, rollouts_N=rollouts_N)
