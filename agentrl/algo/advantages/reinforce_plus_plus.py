"""REINFORCE++."""

from __future__ import annotations

import numpy as np
from pydantic import Field
from typing_extensions import override

from agentrl.algo.advantages.rewards import normalise_tokens, sequences_with_rewards
from agentrl.algo.base import AdvantageEstimator, AdvantageInput, Advantages


class ReinforcePlusPlus(AdvantageEstimator):
    """Each token's discounted return, normalised over all sampled tokens of the training step.

    Source: arXiv:2501.03262, equations 6 to 9. Observed tokens are no time steps.
    """

    class Options(AdvantageEstimator.Options):
        """Options of ``reinforce_plus_plus``."""

        gamma: float = Field(default=1.0, gt=0, le=1)
        """Discount of a sampled token."""

    options: Options

    @override
    def advantages(self, inputs: AdvantageInput) -> Advantages:
        tokens = []
        for sequence, rewards_S in sequences_with_rewards(inputs):
            returns_S, later = np.zeros(len(rewards_S)), 0.0
            for index in reversed(range(len(rewards_S))):
                later = returns_S[index] = rewards_S[index] + self.options.gamma * later
            tokens.append((sequence, returns_S))
        return normalise_tokens(tokens)
