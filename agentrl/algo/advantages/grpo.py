"""Group-relative advantages."""

from __future__ import annotations

import numpy as np

from agentrl.algo.advantages.rewards import by_rollout, centred_N, group_means_N, group_sizes_N, rewards_N
from agentrl.algo.base import AdvantageInput, Advantages
from agentrl.config.algo import GrpoAdvantage


def grpo(given: AdvantageInput, options: GrpoAdvantage) -> Advantages:
    """Return ``r - mean(group)``, divided by ``std(group) + eps`` with ``std_normalise``.

    Source: DeepSeekMath, arXiv:2402.03300, 4.1.2; without the division Dr.GRPO, arXiv:2503.20783. The standard deviation
    is the sample's (n - 1), as TRL, verl and slime have it. A group of one gets 0.
    """
    centred = centred_N(given, rewards_N(given))
    if not options.std_normalise:
        return by_rollout(given, centred)
    sizes = group_sizes_N(given)
    variances = group_means_N(given, centred**2) * sizes / np.maximum(sizes - 1, 1)
    return by_rollout(given, centred / (np.sqrt(variances) + options.std_eps))
