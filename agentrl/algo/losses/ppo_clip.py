"""PPO's clipped objective."""

from __future__ import annotations

import torch


def clipped_policy_loss(
    logprobs_N: torch.Tensor, old_N: torch.Tensor, advantages_N: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PPO's loss ``-min(ρA, clip(ρ, 1 - low, 1 + high)A)`` with ``ρ = exp(logprob - old)``, and where it is clipped.

    Source: Schulman et al., arXiv:1707.06347, equation 7; two bounds as in DAPO, arXiv:2503.14476, equation 8.

    Returns:
        loss ``[N]`` with gradient to ``logprobs_N``, and bool ``[N]``: true where clipping makes the gradient 0.

    """
    ratio_N = (logprobs_N - old_N).exp()
    plain_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    return -torch.minimum(plain_N, clipped_N), (clipped_N < plain_N).detach()
