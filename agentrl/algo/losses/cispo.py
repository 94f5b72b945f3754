"""Clipped importance sampling policy optimisation."""

from __future__ import annotations

import torch
from pydantic import Field
from typing_extensions import override

from agentrl.algo.base import LossInput, PolicyLoss, TokenLoss


class Cispo(PolicyLoss):
    """``-sg(min(ρ, 1 + high)) · A · logprob`` with ``ρ = exp(logprob - old)``; no gradient is cut off.

    Source: MiniMax-M1, arXiv:2506.13585, equations 4 and 5, without the lower limit, which the paper does not use.
    """

    class Options(PolicyLoss.Options):
        """Options of ``cispo``."""

        clip_high: float = Field(default=2.0, gt=0)
        """The ratio's upper limit is ``1 + clip_high``; it has no lower one."""

    options: Options

    @override
    def token_loss(self, logprobs_N: torch.Tensor, old_N: torch.Tensor, inputs: LossInput) -> TokenLoss:
        ratio_N = (logprobs_N.detach() - old_N).exp().clamp(max=1 + self.options.clip_high)
        return TokenLoss(-ratio_N * inputs.advantages_N * logprobs_N, torch.zeros_like(ratio_N, dtype=torch.bool))
