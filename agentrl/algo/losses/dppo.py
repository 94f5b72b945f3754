"""Divergence proximal policy optimisation."""

from __future__ import annotations

import torch

from agentrl.algo.base import LossInput, TokenLoss
from agentrl.config.algo import DppoLoss


def dppo(logprobs_N: torch.Tensor, old_N: torch.Tensor, given: LossInput, options: DppoLoss) -> TokenLoss:
    """Return ``-sg(min(ρ, limit)) · A · logprob`` with ``ρ = exp(logprob - old)``; masked tokens get 0.

    Source: arXiv:2602.04879, the binary forms. A token is masked if its ratio moves away from 1 in the direction of its
    advantage, and the divergence between old and new policy, as distributions over this token and all others, exceeds
    ``clip_high`` (positive advantages) or ``clip_low``. With probabilities p of the old and q of the new policy that is
    ``|p - q|``, or ``p log(p / q) + (1 - p) log((1 - p) / (1 - q))``.
    """
    new_N, grows_N = logprobs_N.detach(), logprobs_N.detach() > old_N
    old_p_N, new_p_N = old_N.exp(), new_N.exp()
    if options.divergence == "tv":
        divergence_N = (new_p_N - old_p_N).abs()
    else:
        others_N = (1 - old_p_N) * (
            torch.log1p(-old_p_N.clamp(max=1 - 1e-7)) - torch.log1p(-new_p_N.clamp(max=1 - 1e-7))
        )
        divergence_N = old_p_N * (old_N - new_N) + others_N
    positive_N = given.advantages_N > 0
    masked_N = torch.where(
        positive_N, grows_N & (divergence_N > options.clip_high), (new_N < old_N) & (divergence_N > options.clip_low)
    )
    ratio_N = (new_N - old_N).exp().clamp(max=options.ratio_limit)
    return TokenLoss(-ratio_N * given.advantages_N * logprobs_N * ~masked_N, masked_N)
