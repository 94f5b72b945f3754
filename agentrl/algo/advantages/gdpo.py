"""Advantages of several rewards, each normalised apart."""

from __future__ import annotations

import numpy as np
from pydantic import PositiveFloat
from typing_extensions import override

from agentrl.algo.advantages.rewards import (
    Floats,
    by_rollout,
    centred_N,
    group_means_N,
    group_sizes_N,
    rewards_N,
)
from agentrl.algo.base import AdvantageEstimator, AdvantageInput, Advantages


class Gdpo(AdvantageEstimator):
    """``Σ_k weight_k · (r_k - mean(group)) / (std(group) + eps)`` over the rewards of ``reward.functions``.

    Source: GDPO, arXiv:2601.05242, section 3; TRL's ``normalize_then_sum``. With ``batch_norm`` the sums are divided by their
    standard deviation over the step; their mean is 0 already. Penalties on the sum (``algo.overlong``, the KL penalty) are one
    reward more, with the weight 1. Standard deviations are the sample's (n - 1). A group of one gets 0.
    """

    compares_group = True
    needs_several_rewards = True

    class Options(AdvantageEstimator.Options):
        """Options of ``gdpo``."""

        batch_norm: bool = True
        """Divide by the standard deviation over the step's rollouts. Without it advantages grow with the number of rewards."""
        std_eps: PositiveFloat = 1e-6
        """Added to standard deviations, so that nearly equal rewards do not explode."""

    options: Options

    @override
    def advantages(self, inputs: AdvantageInput) -> Advantages:
        advantages = np.zeros(len(inputs.groups.rollouts_N))
        for weight_N, values_N in _rewards(inputs):
            advantages += weight_N * self._normalise(inputs, values_N)
        if self.options.batch_norm and len(advantages) > 1 and np.ptp(advantages):
            advantages /= np.std(advantages, ddof=1) + self.options.std_eps
        return by_rollout(inputs, advantages)

    def _normalise(self, inputs: AdvantageInput, values_N: Floats) -> Floats:
        centred, sizes = centred_N(inputs, values_N), group_sizes_N(inputs)
        variances = group_means_N(inputs, centred**2) * sizes / np.maximum(sizes - 1, 1)
        return centred / (np.sqrt(variances) + self.options.std_eps)


def _rewards(inputs: AdvantageInput) -> list[tuple[Floats, Floats]]:
    """Return weights and values of each reward, ``[N]``, then those of what else is in the sum; without several only the sum."""
    rollouts = inputs.groups.rollouts_N
    terms = []
    for name in dict.fromkeys(name for rollout in rollouts for name in rollout.rewards):
        rollout_terms = [rollout.rewards.get(name) for rollout in rollouts]
        weights = np.array([0.0 if term is None else term.weight for term in rollout_terms])
        terms.append((weights, np.array([0.0 if term is None else term.value or 0.0 for term in rollout_terms])))
    sums = np.array([sum(term.weighted for term in rollout.rewards.values()) for rollout in rollouts], np.float64)
    penalties = rewards_N(inputs) - sums
    return [*terms, (np.ones(len(rollouts)), penalties)] if np.abs(penalties).max(initial=0.0) > 1e-9 else terms
