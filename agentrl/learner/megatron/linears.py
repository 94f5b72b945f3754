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
        if _divided(self):
            if self.sequence_parallel:
                hidden = all_gather(hidden, self.tp_group.size(), self.tp_group.group_name)
            else:
                hidden = with_reduced_gradient(hidden, self.tp_group.group_name)
        separate = self.skip_bias_add
        return F.linear(hidden, self.weight, None if separate else self.bias), self.bias if separate else None


class RowLinear(RowParallelLinear):  # type: ignore[misc]
    """A linear layer whose inputs are divided among ranks."""

    def forward(self, hidden: torch.Tensor) -> Result:
        """Return ``[L, 1, O]`` from ``[L, 1, I/P]``, or with sequence parallelism ``[T, 1, O]``."""
        product = F.linear(hidden, self.weight)
        if _divided(self):
            if self.sequence_parallel:
                product = reduce_scatter(product, self.tp_group.size(), self.tp_group.group_name)
            else:
                product = all_reduce(product, self.tp_group.group_name)
        if self.skip_bias_add:
            return product, self.bias
        return product if self.bias is None else product + self.bias, None


def replace_linears(layers: nn.Module) -> None:
    """Replace the linear layers of decoder layers, after they are made: Megatron-Core refuses other classes than its own."""
    classes: dict[Any, Any] = {ColumnParallelLinear: ColumnLinear, RowParallelLinear: RowLinear}
    for module in layers.modules():
        module.__class__ = classes.get(type(module), type(module))


def _divided(layer: Any) -> bool:
    """Return whether ranks have parts of a layer whose tokens they have in common; dispatchers give experts theirs."""
    return layer.tp_group.size() > 1 and not layer.explicit_expert_comm
