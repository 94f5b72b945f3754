"""REINFORCE."""

from __future__ import annotations

import torch

from agentrl.algo.base import LossInput, TokenLoss


def reinforce(logprobs_N: torch.Tensor, old_N: torch.Tensor, given: LossInput) -> TokenLoss:
    """Return ``-A · logprob`` (Williams, 1992, doi:10.1007/BF00992696); ``old_N`` is not used."""
    return TokenLoss(-given.advantages_N * logprobs_N, torch.zeros_like(logprobs_N, dtype=torch.bool))
