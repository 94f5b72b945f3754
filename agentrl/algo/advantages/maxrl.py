"""Advantages of maximum-likelihood reinforcement learning."""

from __future__ import annotations

from agentrl.algo.advantages.rewards import by_rollout, centred_N, group_means_N, rewards_N
from agentrl.algo.base import AdvantageInput, Advantages
from agentrl.config.algo import MaxRlAdvantage
from agentrl.core.errors import ConfigError


def maxrl(given: AdvantageInput, options: MaxRlAdvantage) -> Advantages:
    """Return ``(r - mean(group)) / (mean(group) + eps)``.

    Source: MaxRL, arXiv:2602.02710. With rewards of 0 and 1, it estimates the gradient of the log-probability of success,
    expanded to one term less than the group has rollouts: the last is in groups without success, which get 0.

    Raises:
        ConfigError: a reward is negative.
    """
    rewards = rewards_N(given)
    if (rewards < 0).any():
        raise ConfigError(
            f"algo.advantage.name=maxrl divides by the group's mean reward, and a rollout has reward {rewards.min():g}; "
            "rewards must be at least 0, or choose algo.advantage.name=grpo"
        )
    return by_rollout(given, centred_N(given, rewards) / (group_means_N(given, rewards) + options.eps))
