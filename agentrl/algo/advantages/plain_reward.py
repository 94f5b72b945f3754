"""The reward as the advantage: for rewards that are advantages already."""

from __future__ import annotations

from typing_extensions import override

from agentrl.algo.advantages.rewards import by_rollout, rewards_N
from agentrl.algo.base import AdvantageEstimator, AdvantageInput, Advantages


class PlainReward(AdvantageEstimator):
    """The reward itself, without a baseline (REINFORCE, Williams 1992): for ``algo.reward_post_process`` and rewards around 0."""

    streams = True

    @override
    def advantages(self, inputs: AdvantageInput) -> Advantages:
        return by_rollout(inputs, rewards_N(inputs))
