"""PPO's clipped objective."""

from __future__ import annotations

import torch
from pydantic import Field
from typing_extensions import override

from agentrl.algo.base import MAX_LOG_RATIO, LossInput, PolicyLoss, TokenLoss


class PpoClip(PolicyLoss):
    """``-min(ρA, clip(ρ, 1 - low, 1 + high)A)`` with ``ρ = exp(logprob - old)``.

    Source: Schulman et al., arXiv:1707.06347, equation 7; two bounds as in DAPO, arXiv:2503.14476, equation 8. With
    ``dual_clip`` c, the loss of a negative advantage is at most ``-cA`` (Ye et al., arXiv:1912.09729, equation 5).
    """

    class Options(PolicyLoss.Options):
        """Options of ``ppo_clip``."""

        clip_low: float = Field(default=0.2, gt=0, lt=1)
        """The ratio of new to old probability gains nothing below ``1 - clip_low``."""
        clip_high: float = Field(default=0.2, gt=0)
        """The ratio of new to old probability gains nothing above ``1 + clip_high``; DAPO's clip-higher is 0.28."""
        dual_clip: float | None = Field(default=None, gt=1)
        """With a negative advantage, the ratio costs nothing above this (dual-clip PPO, arXiv:1912.09729; 3 is usual)."""

    options: Options

    @override
    def token_loss(self, logprobs_N: torch.Tensor, old_N: torch.Tensor, inputs: LossInput) -> TokenLoss:
        advantages_N, dual_clip = inputs.advantages_N, self.options.dual_clip
        loss = clip_loss(logprobs_N - old_N, advantages_N, self.options.clip_low, self.options.clip_high)
        if dual_clip is None:
            return loss
        limit_N = -dual_clip * advantages_N
        cut_N = (advantages_N < 0) & (loss.loss_N > limit_N)
        return TokenLoss(torch.where(cut_N, limit_N, loss.loss_N), loss.clipped_N | cut_N)


def clip_loss(log_ratio_N: torch.Tensor, advantages_N: torch.Tensor, low: float, high: float) -> TokenLoss:
    """Return ``-min(ρA, clip(ρ, 1 - low, 1 + high)A)`` with ``ρ = exp(log_ratio)``, at most ``exp(MAX_LOG_RATIO)``."""
    ratio_N = log_ratio_N.clamp(max=MAX_LOG_RATIO).exp()
    plain_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1 - low, 1 + high) * advantages_N
    return TokenLoss(-torch.minimum(plain_N, clipped_N), (clipped_N < plain_N).detach())
