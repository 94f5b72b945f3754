"""Generalised advantage estimation. Legend: ``S`` sampled tokens of a sequence, ``K`` time steps."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field
from typing_extensions import override

from agentrl.algo.advantages.rewards import Floats, by_row, normalise_tokens, sequences_with_rewards
from agentrl.algo.base import AdvantageEstimator, AdvantageInput, Advantages, RowValues
from agentrl.batch.sequences import SampledSequence


class Gae(AdvantageEstimator):
    """The advantage of each sampled token, or of each turn at all of its tokens, with a critic: PPO's estimator.

    Source: Schulman et al., arXiv:1506.02438, equation 16. Time steps are sampled tokens only, or turns: then a step's
    value is that of the turn's first token, and its reward the sum over the turn. After the last step the value is 0.
    """

    needs_critic = True

    class Options(AdvantageEstimator.Options):
        """Options of ``gae``."""

        gamma: float = Field(default=1.0, gt=0, le=1)
        """Discount of a step."""
        lam: float = Field(default=1.0, ge=0, le=1)
        """1 takes the whole return, 0 the temporal difference of one step."""
        step: Literal["token", "turn"] = "token"
        """A time step: every sampled token, or every turn of the policy. Observed tokens are never one."""
        normalise: bool = True
        """Normalise advantages over all sampled tokens of the training step."""

    options: Options

    @override
    def advantages(self, inputs: AdvantageInput) -> Advantages:
        tokens = [(sequence, advantages_S) for sequence, advantages_S, _ in self._estimates(inputs)]
        return normalise_tokens(tokens) if self.options.normalise else by_row(tokens)

    @override
    def returns(self, inputs: AdvantageInput) -> RowValues:
        """Return for each token the advantage before normalisation, plus the value."""
        return by_row(
            [(sequence, advantages_S + values_S) for sequence, advantages_S, values_S in self._estimates(inputs)]
        )

    def _estimates(self, inputs: AdvantageInput) -> list[tuple[SampledSequence, Floats, Floats]]:
        """Return each sequence with the advantages and values of its tokens; with turns, those of their turn."""
        estimates = []
        for sequence, rewards_S in sequences_with_rewards(inputs):
            values_S = sequence.gather(inputs.values)
            if self.options.step == "token":
                estimates.append((sequence, self._advantages_K(rewards_S, values_S), values_S))
                continue
            _, firsts_K, turns_S = np.unique(sequence.turns_S, return_index=True, return_inverse=True)
            rewards_K = np.bincount(turns_S, rewards_S).astype(np.float64)
            advantages_K = self._advantages_K(rewards_K, values_S[firsts_K])
            estimates.append((sequence, advantages_K[turns_S], values_S[firsts_K][turns_S]))
        return estimates

    def _advantages_K(self, rewards_K: Floats, values_K: Floats) -> Floats:
        gamma, lam = self.options.gamma, self.options.lam
        advantages_K, later, next_value = np.zeros(len(rewards_K)), 0.0, 0.0
        for index in reversed(range(len(rewards_K))):
            error = rewards_K[index] + gamma * next_value - values_K[index]
            later = advantages_K[index] = error + gamma * lam * later
            next_value = values_K[index]
        return advantages_K
