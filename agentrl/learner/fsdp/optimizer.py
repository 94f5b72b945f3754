"""Optimizers over sharded parameters, and gradients that are added up in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from agentrl.config.learner import OptimizerConfig
from agentrl.learner.fsdp.adamw_8bit import AdamW8bit, add_rounded
from agentrl.learner.fsdp.compute_copies import take_gradients
from agentrl.learner.fsdp.cpu_muon import CpuMuon


def make_optimizers(
    model: nn.Module, head: nn.Module, config: OptimizerConfig, weights: Sequence[nn.Parameter] | None = None
) -> list[Optimizer]:
    """Return AdamW over all trained parameters, or Muon over the layers' matrices and AdamW over the others.

    Norms and biases have no weight decay, also biases of several experts in one tensor.

    Args:
        model: its parameters that require a gradient are trained.
        head: the output head; like the embeddings it is optimized by AdamW.
        config: optimizer and learning rates, without ``auto``.
        weights: those to train; None are all that require a gradient.
    """
    trained = [p for p in model.parameters() if p.requires_grad] if weights is None else [*weights]
    vectors = {id(p) for name, p in model.named_parameters() if is_vector(name, p)}
    if config.name == "adamw":
        return [_adamw(trained, vectors, config)]
    outer = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    outer |= {id(p) for p in head.parameters()}
    matrices = [p for p in trained if p.ndim == 2 and id(p) not in outer | vectors]
    chosen = {id(p) for p in matrices}
    adamw_parameters = [p for p in trained if id(p) not in chosen]
    optimizers = [_muon(matrices, config)] if matrices else []
    return [*optimizers, _adamw(adamw_parameters, vectors, config)] if adamw_parameters else optimizers


def is_vector(name: str, weight: torch.Tensor) -> bool:
    """Return whether a weight is a vector, or the biases of several experts, such as gpt-oss has them."""
    return weight.ndim <= 1 or name.endswith("bias")


def _muon(parameters: list[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    muon = CpuMuon if parameters[0].device.type == "cpu" else torch.optim.Muon
    return muon(
        parameters,
        lr=config.fixed_lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )


def _adamw(parameters: list[nn.Parameter], vectors: set[int], config: OptimizerConfig) -> Optimizer:
    options: dict[str, Any] = {"betas": config.betas, "eps": config.eps}
    groups = [
        {"params": [p for p in parameters if id(p) not in vectors], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if id(p) in vectors], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.state == "8bit":
        return AdamW8bit(groups, lr=config.fixed_lr, **options)
    return torch.optim.AdamW(groups, lr=config.fixed_lr, fused=True, **options)


class RoundedGradients:
    """Gradients of micro-batches, added up in bfloat16 (`add_rounded`): a backward pass has float32 ones of one layer at a time.

    Args:
        leaves: those of the backward pass by weight, whole ones: a weight itself or its copy; see `ComputeCopies`.
    """

    def __init__(self, leaves: dict[nn.Parameter, nn.Parameter]) -> None:
        self.step = 0
        """The number of finished optimizer steps, which the noise depends on."""
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._added = 0
        """Gradients that were added since the last step."""
        for weight in leaves:
            weight.grad_dtype = None  # the sum is not of the weight's dtype
        take_gradients(leaves, self._add)

    def _add(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        if weight not in self._sums:
            self._sums[weight] = torch.zeros_like(weight, dtype=torch.bfloat16)
        seed = torch.full((), self.step << 32 | self._added, device=weight.device)
        add_rounded(self._sums[weight], gradient, seed)
        self._added += 1

    def hand_over(self) -> None:
        """Make the sums the gradients of their weights."""
        while self._sums:
            weight, total = self._sums.popitem()
            weight.grad = total

    def clear(self) -> None:
        """Drop the sums."""
        self._sums.clear()
        self._added = 0
