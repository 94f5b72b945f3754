"""The loss of supervised fine-tuning."""

from __future__ import annotations

import torch

from agentrl.algo.base import LossInput, LossMetrics


def sft_loss(logprobs_N: torch.Tensor, inputs: LossInput) -> tuple[torch.Tensor, LossMetrics]:
    """Return the weighted cross entropy ``-Σ weight · logprob``; its metric ``nll`` is the unweighted mean per token."""
    return -(inputs.weight_N * logprobs_N).sum(), LossMetrics(sums={"nll": -logprobs_N.detach().sum()})
