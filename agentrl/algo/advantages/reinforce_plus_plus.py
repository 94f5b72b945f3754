"""REINFORCE++ and its baseline form (arXiv:2501.03262)."""

from __future__ import annotations

import numpy as np

from agentrl.algo.advantages.rewards import by_rollout, centred_N, normalised, rewards_N, sequences_with_rewards
from agentrl.algo.base import AdvantageInput, Advantages
from agentrl.batch.sequences import sampled_sequences
from agentrl.config.algo import ReinforcePlusPlusAdvantage


def reinforce_plus_plus(given: AdvantageInput, options: ReinforcePlusPlusAdvantage) -> Advantages:
    """Return each token's discounted return, normalised over all sampled tokens of the training step.

    Source: arXiv:2501.03262, equations 6 to 9. Observed tokens are no time steps.
    """
    tokens = []
    for sequence, rewards_S in sequences_with_rewards(given):
        returns_S, later = np.zeros(len(rewards_S)), 0.0
        for index in reversed(range(len(rewards_S))):
            later = returns_S[index] = rewards_S[index] + options.gamma * later
        tokens.append((sequence, returns_S))
    return normalised(tokens)


def reinforce_plus_plus_baseline(given: AdvantageInput) -> Advantages:
    """Return the reward minus the group's mean, normalised over all sampled tokens of the training step.

    Source: arXiv:2501.03262, section 3.2. Tokens of a rollout have one value; a group of one keeps its reward.
    """
    rewards = rewards_N(given)
    sizes = np.bincount(given.groups.groups_N)[given.groups.groups_N]
    values = by_rollout(given, np.where(sizes > 1, centred_N(given, rewards), rewards))
    return normalised(
        [
            (sequence, np.full(sequence.size, values[rollout.rollout_id]))
            for rollout in given.groups.rollouts_N
            for sequence in sampled_sequences(rollout)
        ]
    )
