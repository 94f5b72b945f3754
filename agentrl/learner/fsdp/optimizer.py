"""Optimizers over sharded parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from agentrl.config.learner import OptimizerConfig


def make_optimizers(model: nn.Module, head: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """Return AdamW over what is trained, or Muon over the layers' matrices and AdamW over the rest.

    Vectors, such as norms and biases, have no weight decay.

    Args:
        model: its parameters that require a gradient are trained.
        head: the output head; like the embeddings it is optimized by AdamW.
        config: optimizer and learning rates, without ``auto``.

    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if config.name == "adamw":
        return [_adamw(trained, config)]
    outer = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    outer |= {id(p) for p in head.parameters()}
    matrices = [p for p in trained if p.ndim == 2 and id(p) not in outer]
    chosen = {id(p) for p in matrices}
    rest = [p for p in trained if id(p) not in chosen]
    made = {_muon: matrices, _adamw: rest}
    return [make(parameters, config) for make, parameters in made.items() if parameters]


def _muon(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.Muon(
        parameters,
        lr=config.fixed_lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )


def _adamw(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"betas": config.betas, "eps": config.eps}
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.fixed_lr, fused=True, **options)
