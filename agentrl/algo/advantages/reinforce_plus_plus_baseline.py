"""The baseline form of REINFORCE++."""

from __future__ import annotations

import numpy as np
from typing_extensions import override

from agentrl.algo.advantages.rewards import by_rollout, centred_N, normalise_tokens, rewards_N
from agentrl.algo.base import AdvantageEstimator, AdvantageInput, Advantages
from agentrl.batch.sequences import sampled_sequences


class ReinforcePlusPlusBaseline(AdvantageEstimator):
    """The reward minus the group's mean, normalised over all sampled tokens of the training step.

    Source: arXiv:2501.03262, section 3.2. Tokens of a rollout have one value; a group of one keeps its reward.
    """

    @override
    def advantages(self, inputs: AdvantageInput) -> Advantages:
        rewards = rewards_N(inputs)
        sizes = np.bincount(inputs.groups.groups_N)[inputs.groups.groups_N]
        centred = by_rollout(inputs, np.where(sizes > 1, centred_N(inputs, rewards), rewards))
        return normalise_tokens(
            [
                (sequence, np.full(sequence.size, centred[rollout.rollout_id]))
                for rollout in inputs.groups.rollouts_N
                for sequence in sampled_sequences(rollout)
            ]
        )
