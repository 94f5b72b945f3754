"""REINFORCE with a leave-one-out baseline."""

from __future__ import annotations

import numpy as np

from agentrl.algo.advantages.rewards import by_rollout, centred_N, group_sizes_N, rewards_N
from agentrl.algo.base import AdvantageInput, Advantages


def rloo(given: AdvantageInput) -> Advantages:
    """Return the reward minus the mean reward of the group's other rollouts; 0 in a group of one.

    Source: Ahmadian et al., arXiv:2402.14740, section 3. With k rollouts that is ``k / (k - 1) · (r - mean(group))``.
    """
    sizes = group_sizes_N(given)
    return by_rollout(given, centred_N(given, rewards_N(given)) * sizes / np.maximum(sizes - 1, 1))
