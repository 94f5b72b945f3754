"""REINFORCE."""

from __future__ import annotations

import torch
from typing_extensions import override

from agentrl.algo.base import LossInput, PolicyLoss, TokenLoss


class Reinforce(PolicyLoss):
    """``-A · logprob`` (Williams, 1992, doi:10.1007/BF00992696), without a ratio."""

    @override
    def token_loss(self, logprobs_N: torch.Tensor, old_N: torch.Tensor, inputs: LossInput) -> TokenLoss:
        return TokenLoss(-inputs.advantages_N * logprobs_N, torch.zeros_like(logprobs_N, dtype=torch.bool))
