"""REINFORCE with a leave-one-out baseline."""

from __future__ import annotations

import numpy as np
from typing_extensions import override

from agentrl.algo.advantages.rewards import by_rollout, centred_N, group_sizes_N, rewards_N
from agentrl.algo.base import AdvantageEstimator, AdvantageInput, Advantages


class Rloo(AdvantageEstimator):
    """The reward minus the mean reward of the group's other rollouts; 0 in a group of one.

    Source: Ahmadian et al., arXiv:2402.14740, section 3. With k rollouts that is ``k / (k - 1) · (r - mean(group))``.
    """

    compares_group = True
    streams = True

    @override
    def advantages(self, inputs: AdvantageInput) -> Advantages:
        sizes = group_sizes_N(inputs)
        return by_rollout(inputs, centred_N(inputs, rewards_N(inputs)) * sizes / np.maximum(sizes - 1, 1))
