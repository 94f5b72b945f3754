"""Linear layers of Megatron-Core models, with collectives that a compiler takes.

Megatron-Core's own wait for collectives and write to shared buffers within their autograd functions, around which a compiler
would cut a layer into pieces.

Legend: ``L`` tokens of a micro-batch, ``T`` of a rank's part of them, ``P`` tensor-parallel ranks, ``I`` inputs, ``O`` outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import nn

from agentrl.learner.collectives import all_gather, all_reduce, reduce_scatter, with_reduced_gradient

Result = tuple[torch.Tensor, torch.Tensor | None]
"""The product, and the bias if the caller adds it."""


class ColumnLinear(ColumnParallelLinear):  # type: ignore[misc]
    """A linear layer whose outputs are divided among ranks."""

    def forward(self, hidden: torch.Tensor, weight: None = None, runtime_gather_output: None = None) -> Result:
        """Return ``[L, 1, O/P]`` from ``[L, 1, I]``, or with sequence parallelism from ``[T, 1, I]``."""
        if self.is_divided:
            if self.sequence_parallel:
                hidden = all_gather(hidden, self.tensor_ranks, self.tensor_group)
            else:
                hidden = with_reduced_gradient(hidden, self.tensor_group)
        separate = self.skip_bias_add
        return F.linear(hidden, self.weight, None if separate else self.bias), self.bias if separate else None


class RowLinear(RowParallelLinear):  # type: ignore[misc]
    """A linear layer whose inputs are divided among ranks."""

    def forward(self, hidden: torch.Tensor) -> Result:
        """Return ``[L, 1, O]`` from ``[L, 1, I/P]``, or with sequence parallelism ``[T, 1, O]``."""
        product = F.linear(hidden, self.weight)
        if self.is_divided:
            if self.sequence_parallel:
                product = reduce_scatter(product, self.tensor_ranks, self.tensor_group)
            else:
                product = all_reduce(product, self.tensor_group)
        if self.skip_bias_add:
            return product, self.bias
        return product if self.bias is None else product + self.bias, None


def replace_linears(layers: nn.Module) -> None:
    """Replace the linear layers of decoder layers, after they are made: Megatron-Core refuses other classes than its own."""
    classes: dict[Any, Any] = {ColumnParallelLinear: ColumnLinear, RowParallelLinear: RowLinear}
    for module in layers.modules():
        if type(module) in classes:
            module.__class__ = classes[type(module)]
            _describe_ranks(module)


def _describe_ranks(linear: Any) -> None:
    """Set what a compiler can read of a process group. Experts need no collectives: dispatchers give them their tokens."""
    linear.tensor_ranks, linear.tensor_group = linear.tp_group.size(), linear.tp_group.group_name
    linear.is_divided = linear.tensor_ranks > 1 and not linear.explicit_expert_comm
