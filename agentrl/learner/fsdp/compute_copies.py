"""bfloat16 copies of float32 weights, which matrix products read.

Compiled layers of a single rank would cast their weights in every pass of every micro-batch, and gradients back. Both are bound
by memory. Copies are made once a step. Several ranks gather weights in bfloat16 anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from typing_extensions import override

from agentrl.config.learner import LearnerConfig, Recompute


def copies_weights(config: LearnerConfig, recompute: Recompute, *, ranks: int, bfloat16: bool, compiled: bool) -> bool:
    """Return whether a rank has copies. Long rows, for which more is computed again, want the memory."""
    plain = config.lora is None and not config.fp8
    return ranks == 1 and bfloat16 and compiled and plain and recompute in ("none", "selective")


def copied_layers(layers: Iterable[nn.Module]) -> list[nn.Linear]:
    """Return the trained linear layers of decoder layers."""
    modules = (module for layer in layers for module in layer.modules())
    return [module for module in modules if type(module) is nn.Linear and module.weight.requires_grad]


class CopiedLinear(nn.Linear):
    """A linear layer whose product, under autocast, reads a copy of the weight."""

    weight_copy: nn.Parameter
    """No parameter of the module."""

    @override
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        return F.linear(input, self.weight_copy, self.bias)


class ComputeCopies:
    """The copies of trained linear layers, whose weights must be loaded.

    Args:
        layers: decoder layers.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.by_weight: dict[nn.Parameter, nn.Parameter] = {}
        """Leaves of the backward pass."""
        for linear in copied_layers(layers):
            linear.__class__ = CopiedLinear
            copy = nn.Parameter(torch.empty_like(linear.weight, dtype=torch.bfloat16))
            weight: Any = linear.weight
            object.__setattr__(linear, "weight_copy", self.by_weight.setdefault(weight, copy))
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights, which have changed, or whose copies were released."""
        for copy in self.by_weight.values():
            copy.untyped_storage().resize_(copy.numel() * copy.element_size())
        torch._foreach_copy_([*self.by_weight.values()], [*self.by_weight])

    def release(self) -> None:
        """Free the memory of the copies until `refresh`."""
        for copy in self.by_weight.values():
            copy.untyped_storage().resize_(0)


def take_gradients(
    leaves: dict[nn.Parameter, nn.Parameter], take: Callable[[nn.Parameter, torch.Tensor], None]
) -> None:
    """Call a function with each weight and the gradient of its leaf, as soon as a backward pass has it; the leaf keeps none."""

    def hook(weight: nn.Parameter, leaf: nn.Parameter) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        take(weight, gradient)

    for weight, leaf in leaves.items():
        register: Any = leaf.register_post_accumulate_grad_hook
        register(partial(hook, weight))


def add_gradient(weight: nn.Parameter, gradient: torch.Tensor) -> None:
    """Add the gradient of a copy to that of its weight, in the weight's dtype."""
    if weight.grad is None:
        weight.grad = gradient.to(weight.dtype)
    else:
        weight.grad.add_(gradient)
