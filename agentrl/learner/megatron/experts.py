"""Experts of a rank as grouped products, and the pairs of tokens and experts that its ranks exchange.

Megatron-Core's own grouped experts need Transformer Engine or the package grouped_gemm, and its permutations of tokens have
the host wait several times in every layer.

Legend: ``T`` tokens, ``K`` experts of a token, ``S`` pairs of both, ``E`` experts, ``H`` hidden size, ``I`` and ``O`` sizes
before and after a product, ``P`` and ``Q`` ranks of expert and of expert tensor parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.module import MegatronModule
from torch import nn


class GroupedLinear(nn.Module):
    """The weights of a rank's experts, stacked, and the product of each row with its expert's.

    Args:
        config: of Megatron-Core.
        shape: ``[E, O, I]`` on this rank.
    """

    def __init__(self, config: Any, *shape: int) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))

    def forward(self, rows_S_I: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Return ``[S, O]``, from rows in the order of their experts and the int32 end of each expert's rows."""
        if not len(rows_S_I):
            return rows_S_I @ self.weight[0].t()  # has gradients, of zeros
        return F.grouped_mm(rows_S_I, self.weight.transpose(-2, -1), offs=ends_E)


class GroupedExperts(MegatronModule):  # type: ignore[misc]
    """The gated MLPs of a rank's experts. Replaces Megatron-Core's ``SequentialMLP``.

    Args:
        count: experts of this rank.
        config: of Megatron-Core.
        pg_collection: its process groups.
    """

    def __init__(self, count: int, config: Any, pg_collection: Any) -> None:
        super().__init__(config=config)
        self._expert, self._tensor, self._data = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        hidden, middle = config.hidden_size, config.moe_ffn_hidden_size // self._tensor.size()
        self.linear_fc1 = GroupedLinear(config, count, 2 * middle, hidden)
        self.linear_fc2 = GroupedLinear(config, count, hidden, middle)
        for weight in self.parameters():
            # Their gradients are added up over the data-parallel ranks of experts, and they have a separate optimizer
            # in every layout: checkpoints of all layouts have the same names.
            weight.allreduce = False

    def forward(
        self, rows_S_H: torch.Tensor, counts_E: torch.Tensor, weights_S: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Compute the experts.

        Args:
            rows_S_H: hidden states of the pairs, in the order of their experts.
            counts_E: pairs of each expert.
            weights_S: of the pairs, from the router.
        """
        ends_E = counts_E.to(rows_S_H.device).cumsum(0, dtype=torch.int32)
        gate_up = self.linear_fc1(rows_S_H, ends_E)
        if self.config.bias_activation_fusion:
            middle = weighted_bias_swiglu_impl(gate_up, None, weights_S[:, None])
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            middle = (F.silu(gate) * up * weights_S[:, None]).to(gate_up.dtype)
        return self.linear_fc2(middle, ends_E), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the weights with the names and shapes that Megatron-Core's experts have in distributed checkpoints."""
        first = len(sharded_offsets)
        experts = (first, self._expert.rank(), self._expert.size())
        rank, size = self._tensor.rank(), self._tensor.size()
        replica = (0, 0, self._data.rank())

        def shard(key: str, tensor: torch.Tensor, axis: int, index: int, count: int) -> ShardedTensor:
            offsets = (*sharded_offsets, experts, (first + axis, index, count))
            return ShardedTensor.from_rank_offsets(key, tensor, *offsets, replica_id=replica, prepend_axis_num=first)

        def shard_gate_up(key: str, tensor: torch.Tensor, *args: Any) -> list[ShardedTensor]:
            # Ranks divide each of the two projections.
            gate, up = tensor.detach().chunk(2, dim=1)
            return [shard(key, gate, 1, rank, 2 * size), shard(key, up, 1, size + rank, 2 * size)]

        weight, key = self.linear_fc1.weight, f"{prefix}experts.linear_fc1.weight"
        fc1 = ShardedTensorFactory(key, weight, shard_gate_up, lambda tensors: torch.cat(tensors, dim=1), replica)
        fc2 = shard(f"{prefix}experts.linear_fc2.weight", self.linear_fc2.weight, 2, rank, size)
        return {f"{prefix}linear_fc1.weight": fc1, f"{prefix}linear_fc2.weight": fc2}

    def backward_dw(self) -> None:
        """Do nothing: the backward pass computes the weights' gradients."""
