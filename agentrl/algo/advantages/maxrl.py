"""Advantages of maximum-likelihood reinforcement learning."""

from __future__ import annotations

from pydantic import PositiveFloat
from typing_extensions import override

from agentrl.algo.advantages.rewards import by_rollout, centred_N, group_means_N, rewards_N
from agentrl.algo.base import AdvantageEstimator, AdvantageInput, Advantages
from agentrl.core.errors import ConfigError


class MaxRl(AdvantageEstimator):
    """``(r - mean(group)) / (mean(group) + eps)``, for rewards of at least 0.

    Source: MaxRL, arXiv:2602.02710. With rewards of 0 and 1, it estimates the gradient of the log-probability of success,
    expanded to one term less than the group has rollouts: the last is in groups without success, which get 0.
    """

    compares_group = True
    streams = True
    needs_nonnegative_rewards = True

    class Options(AdvantageEstimator.Options):
        """Options of ``maxrl``."""

        eps: PositiveFloat = 1e-6
        """Added to that mean."""

    options: Options

    @override
    def advantages(self, inputs: AdvantageInput) -> Advantages:
        rewards = rewards_N(inputs)
        if (rewards < 0).any():
            raise ConfigError(
                f"algo.advantage.name={self.name} divides by the group's mean reward, and a rollout has reward "
                f"{rewards.min():g}; rewards must be at least 0, or choose algo.advantage.name=grpo"
            )
        return by_rollout(inputs, centred_N(inputs, rewards) / (group_means_N(inputs, rewards) + self.options.eps))
