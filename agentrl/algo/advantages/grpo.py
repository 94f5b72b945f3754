"""Group-relative advantages."""

from __future__ import annotations

import numpy as np
from pydantic import PositiveFloat
from typing_extensions import override

from agentrl.algo.advantages.rewards import by_rollout, centred_N, group_means_N, group_sizes_N, rewards_N
from agentrl.algo.base import AdvantageEstimator, AdvantageInput, Advantages


class Grpo(AdvantageEstimator):
    """``r - mean(group)``, divided by ``std(group) + eps`` with ``std_normalise``.

    Source: DeepSeekMath, arXiv:2402.03300, 4.1.2; without the division Dr.GRPO, arXiv:2503.20783. The standard deviation
    is the sample's (n - 1), as TRL, verl and slime have it. A group of one gets 0.
    """

    compares_group = True
    streams = True

    class Options(AdvantageEstimator.Options):
        """Options of ``grpo``."""

        std_normalise: bool = True
        """Divide by the standard deviation (n - 1) of the group's rewards. Dr.GRPO (arXiv:2503.20783) does not."""
        std_eps: PositiveFloat = 1e-6
        """Added to that standard deviation, so that nearly equal rewards do not explode."""

    options: Options

    @override
    def advantages(self, inputs: AdvantageInput) -> Advantages:
        centred = centred_N(inputs, rewards_N(inputs))
        if not self.options.std_normalise:
            return by_rollout(inputs, centred)
        sizes = group_sizes_N(inputs)
        variances = group_means_N(inputs, centred**2) * sizes / np.maximum(sizes - 1, 1)
        return by_rollout(inputs, centred / (np.sqrt(variances) + self.options.std_eps))
