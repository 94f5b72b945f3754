"""An advantage estimator and a policy loss."""

import numpy as np
import torch
from pydantic import Field

from agentrl.algo.base import AdvantageEstimator, AdvantageInput, LossInput, PolicyLoss, TokenLoss


class Ranks(AdvantageEstimator):
    """The share of the group's other rollouts that are worse, minus the share that are better.

    So advantages are between -1 and 1, and the scale of the rewards does not matter.
    """

    compares_group = True
    streams = True

    def advantages(self, inputs: AdvantageInput) -> dict[str, float]:
        rewards_N, groups_N = inputs.groups.rewards_N, inputs.groups.groups_N
        advantages = {}
        for index, rollout in enumerate(inputs.groups.rollouts_N):
            group = rewards_N[groups_N == groups_N[index]]
            advantages[rollout.rollout_id] = float(np.sign(rewards_N[index] - group).sum() / max(1, len(group) - 1))
        return advantages


class Quadratic(PolicyLoss):
    """``-(ρA - |A| (ρ - 1)² / 2ε)`` with ``ρ = exp(logprob - old)``: a penalty in place of PPO's clipping.

    Source: Simple Policy Optimization, arXiv:2401.16025.
    """

    class Options(PolicyLoss.Options):
        epsilon: float = Field(default=0.2, gt=0)
        """The distance of the ratio from 1 at which the gradient becomes 0."""

    options: Options

    def token_loss(self, logprobs_N: torch.Tensor, old_N: torch.Tensor, inputs: LossInput) -> TokenLoss:
        ratio_N, advantages_N, epsilon = (logprobs_N - old_N).exp(), inputs.advantages_N, self.options.epsilon
        penalty_N = advantages_N.abs() * (ratio_N - 1).square() / (2 * epsilon)
        # For the metric train/clip_fraction: where the penalty's gradient is larger than the gain's.
        clipped_N = (ratio_N - 1) * advantages_N.sign() > epsilon
        return TokenLoss(penalty_N - ratio_N * advantages_N, clipped_N.detach())
