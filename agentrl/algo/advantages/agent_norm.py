"""Returns of turns, normalised by role. Legend: ``S`` sampled tokens of a sequence, ``K`` turns."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from pydantic import Field, PositiveFloat
from typing_extensions import override

from agentrl.algo.advantages.rewards import by_row, sequences_with_returns
from agentrl.algo.base import AdvantageEstimator, AdvantageInput, Advantages


class AgentNorm(AdvantageEstimator):
    """Each turn's return, normalised over all turns of its role in the training step.

    Source: MARSHAL, arXiv:2510.15414, section 3: ``(R - mean) / (std + eps)`` for each role, so that a role with larger rewards,
    or the better one of two roles, does not dominate. A role whose returns are all equal gets 0. The standard deviation
    is the sample's (n - 1).
    """

    class Options(AdvantageEstimator.Options):
        """Options of ``agent_norm``."""

        gamma: float = Field(default=1.0, gt=0, le=1)
        """Discount of a turn."""
        std_eps: PositiveFloat = 1e-6
        """Added to the standard deviation (n - 1)."""

    options: Options

    @override
    def advantages(self, inputs: AdvantageInput) -> Advantages:
        sequences = sequences_with_returns(inputs, self.options.gamma)
        roles = {rollout.rollout_id: rollout.role for rollout in inputs.groups.rollouts_N}
        keys = [sequence.rows[0].key for _, sequence, _ in sequences]
        agents = [(roles[key.rollout_id], key.agent_id) for key in keys]
        returns: dict[tuple[str, str], list[float]] = defaultdict(list)
        for agent, (_, _, returns_K) in zip(agents, sequences, strict=True):
            returns[agent] += returns_K.tolist()
        scales = {
            agent: (np.mean(pooled), np.std(pooled, ddof=1) + self.options.std_eps if np.ptp(pooled) else np.inf)
            for agent, pooled in returns.items()
        }
        tokens = []
        for agent, (_, sequence, returns_K) in zip(agents, sequences, strict=True):
            mean, scale = scales[agent]
            tokens.append((sequence, ((returns_K - mean) / scale)[sequence.turns_S]))
        return by_row(tokens)
