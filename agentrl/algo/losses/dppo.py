"""Divergence proximal policy optimisation."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from typing_extensions import override

from agentrl.algo.base import LossInput, PolicyLoss, TokenLoss


class Dppo(PolicyLoss):
    """``-sg(min(ρ, limit)) · A · logprob`` with ``ρ = exp(logprob - old)``; masked tokens get 0.

    Source: arXiv:2602.04879, the binary forms. A token is masked if its ratio moves away from 1 in the direction of its
    advantage, and the divergence between old and new policy, as distributions over this token and all others, exceeds
    ``clip_high`` (positive advantages) or ``clip_low``. With probabilities p of the old and q of the new policy that is
    ``|p - q|``, or ``p log(p / q) + (1 - p) log((1 - p) / (1 - q))``.
    """

    class Options(PolicyLoss.Options):
        """Options of ``dppo``."""

        divergence: Literal["tv", "kl"] = "tv"
        """Total variation or KL divergence between the old and the new policy, of the sampled token against all others."""
        clip_low: float = Field(default=0.2, gt=0)
        """Tokens with a negative advantage are masked if their ratio is below 1 and the divergence is above this."""
        clip_high: float = Field(default=0.2, gt=0)
        """Tokens with a positive advantage are masked if their ratio is above 1 and the divergence is above this."""
        ratio_limit: float = Field(default=20.0, gt=1)
        """Upper limit of the ratio, which is a weight without gradient."""

    options: Options

    @override
    def token_loss(self, logprobs_N: torch.Tensor, old_N: torch.Tensor, inputs: LossInput) -> TokenLoss:
        options = self.options
        new_N, grows_N = logprobs_N.detach(), logprobs_N.detach() > old_N
        old_p_N, new_p_N = old_N.exp(), new_N.exp()
        if options.divergence == "tv":
            divergence_N = (new_p_N - old_p_N).abs()
        else:
            other_tokens_N = (1 - old_p_N) * (
                torch.log1p(-old_p_N.clamp(max=1 - 1e-7)) - torch.log1p(-new_p_N.clamp(max=1 - 1e-7))
            )
            divergence_N = old_p_N * (old_N - new_N) + other_tokens_N
        positive_N = inputs.advantages_N > 0
        masked_N = torch.where(
            positive_N,
            grows_N & (divergence_N > options.clip_high),
            (new_N < old_N) & (divergence_N > options.clip_low),
        )
        ratio_N = (new_N - old_N).exp().clamp(max=options.ratio_limit)
        return TokenLoss(-ratio_N * inputs.advantages_N * logprobs_N * ~masked_N, masked_N)
