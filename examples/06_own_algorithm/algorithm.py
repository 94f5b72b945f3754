"""An advantage estimator and a policy loss."""

import numpy as np
import torch

from agentrl.algo.base import AdvantageInput, LossInput, TokenLoss


def ranks(given: AdvantageInput) -> dict[str, float]:
    """Return by ``rollout_id`` the share of the group's other rollouts that are worse, minus the share that are better.

    So advantages are between -1 and 1, and the scale of the rewards does not matter.
    """
    rewards_N, groups_N = given.groups.rewards_N, given.groups.groups_N
    found = {}
    for index, rollout in enumerate(given.groups.rollouts_N):
        group = rewards_N[groups_N == groups_N[index]]
        found[rollout.rollout_id] = float(np.sign(rewards_N[index] - group).sum() / max(1, len(group) - 1))
    return found


def quadratic(logprobs_N: torch.Tensor, old_N: torch.Tensor, given: LossInput, epsilon: float = 0.2) -> TokenLoss:
    """Return ``-(ρA - |A| (ρ - 1)² / 2ε)`` with ``ρ = exp(logprob - old)``: a penalty in place of PPO's clipping.

    Source: Simple Policy Optimization, arXiv:2401.16025. ``algo.loss.options.epsilon`` is ε, where the gradient becomes 0.
    """
    ratio_N, advantages_N = (logprobs_N - old_N).exp(), given.advantages_N
    penalty_N = advantages_N.abs() * (ratio_N - 1).square() / (2 * epsilon)
    # For the metric train/clip_fraction: where the penalty's gradient is larger than the gain's.
    held_N = (ratio_N - 1) * advantages_N.sign() > epsilon
    return TokenLoss(penalty_N - ratio_N * advantages_N, held_N.detach())
