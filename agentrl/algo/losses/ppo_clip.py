"""PPO's clipped objective."""

from __future__ import annotations

import torch

from agentrl.algo.base import MAX_LOG_RATIO, LossInput, TokenLoss
from agentrl.config.algo import PpoClipLoss


def ppo_clip(logprobs_N: torch.Tensor, old_N: torch.Tensor, given: LossInput, options: PpoClipLoss) -> TokenLoss:
    """Return ``-min(ρA, clip(ρ, 1 - low, 1 + high)A)`` with ``ρ = exp(logprob - old)``.

    Source: Schulman et al., arXiv:1707.06347, equation 7; two bounds as in DAPO, arXiv:2503.14476, equation 8. With
    ``dual_clip`` c, the loss of a negative advantage is at most ``-cA`` (Ye et al., arXiv:1912.09729, equation 5).
    """
    loss = clipped(logprobs_N - old_N, given.advantages_N, options.clip_low, options.clip_high)
    if options.dual_clip is None:
        return loss
    limit_N = -options.dual_clip * given.advantages_N
    cut_N = (given.advantages_N < 0) & (loss.loss_N > limit_N)
    return TokenLoss(torch.where(cut_N, limit_N, loss.loss_N), loss.clipped_N | cut_N)


def clipped(log_ratio_N: torch.Tensor, advantages_N: torch.Tensor, low: float, high: float) -> TokenLoss:
    """Return ``-min(ρA, clip(ρ, 1 - low, 1 + high)A)`` with ``ρ = exp(log_ratio)``, at most ``exp(MAX_LOG_RATIO)``."""
    ratio_N = log_ratio_N.clamp(max=MAX_LOG_RATIO).exp()
    plain_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1 - low, 1 + high) * advantages_N
    return TokenLoss(-torch.minimum(plain_N, clipped_N), (clipped_N < plain_N).detach())
