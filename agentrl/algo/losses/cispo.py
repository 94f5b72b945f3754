"""Clipped importance sampling policy optimisation."""

from __future__ import annotations

import torch

from agentrl.algo.base import LossInput, TokenLoss
from agentrl.config.algo import CispoLoss


def cispo(logprobs_N: torch.Tensor, old_N: torch.Tensor, given: LossInput, options: CispoLoss) -> TokenLoss:
    """Return ``-sg(min(ρ, 1 + high)) · A · logprob`` with ``ρ = exp(logprob - old)``; no gradient is cut off.

    Source: MiniMax-M1, arXiv:2506.13585, equations 4 and 5, without the lower limit, which the paper does not use.
    """
    ratio_N = (logprobs_N.detach() - old_N).exp().clamp(max=1 + options.clip_high)
    return TokenLoss(-ratio_N * given.advantages_N * logprobs_N, torch.zeros_like(ratio_N, dtype=torch.bool))
