"""Pairs of tokens and experts: their order, and their exchange between ranks.

Megatron-Core's own dispatcher has the host wait several times in every layer, and adds up the experts of a token in bfloat16.
Here the host waits for the sizes of an exchange only: never without expert and expert tensor parallelism.

Legend: ``T`` tokens, ``K`` experts of a token, ``S`` pairs of token and expert, ``R`` pairs that this rank computes,
``E`` experts, ``H`` hidden size, ``P`` and ``Q`` ranks of expert and of expert tensor parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher


class PairDispatcher(MoETokenDispatcher):  # type: ignore[misc]
    """Exchanges pairs by all-to-all. Replaces Megatron-Core's ``MoEAlltoAllTokenDispatcher``.

    Args:
        config: of Megatron-Core.
        local: indices of this rank's experts.
    """

    def __init__(self, config: Any, local: list[int]) -> None:
        super().__init__(config, get_default_pg_collection())
        self._local = slice(local[0], local[-1] + 1)
        self._is_single_rank = self.ep_size == self.tp_size == 1

    def dispatch_preprocess(
        self, hidden: torch.Tensor, chosen_T_E: torch.Tensor, probs_T_E: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states and weights of the pairs, in the order of their experts."""
        self._shape = hidden.shape
        hidden_T_H, (tokens, experts) = hidden.view(-1, self._shape[-1]), chosen_T_E.shape
        counts_E = chosen_T_E.sum(0)
        if self._is_single_rank:
            self._counts = counts_E
        else:
            self._exchange_counts(counts_E)
        pairs = torch.nonzero_static(chosen_T_E.t(), size=tokens * self.config.moe_router_topk)
        expert_S, token_S = pairs.unbind(1)
        self._token_S = token_S
        self._place_T_K = token_S.argsort(stable=True).view(tokens, -1)
        weights_S = probs_T_E.flatten().index_select(0, token_S * experts + expert_S)
        return _spread(hidden_T_H, token_S, self._place_T_K), weights_S

    def _exchange_counts(self, counts_E: torch.Tensor) -> None:
        """Exchange how many pairs every rank has for this rank's experts, and start to copy the sizes to the host."""
        all_counts = counts_E.new_empty(self.ep_size * self.tp_size * len(counts_E))
        dist.all_gather_into_tensor(all_counts, counts_E, group=self.tp_ep_group)
        local_counts_Q_P_E = all_counts.view(self.ep_size, self.tp_size, -1)[..., self._local].transpose(0, 1)
        self._counts_Q_P_E = local_counts_Q_P_E
        self._counts = local_counts_Q_P_E.sum((0, 1))
        sent = counts_E.view(self.ep_size, -1).sum(1)
        self._sizes = _HostCopy(torch.cat([sent, local_counts_Q_P_E.sum(2).flatten()]))

    def token_dispatch(self, rows_S_H: torch.Tensor, weights_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Exchange the pairs between ranks of expert parallelism."""
        if self._is_single_rank:
            return rows_S_H, weights_S
        sizes = self._sizes.read()
        self._sent, received = sizes[: self.ep_size], sizes[self.ep_size :]
        by_rank = [received[start : start + self.ep_size] for start in range(0, len(received), self.ep_size)]
        self._received = by_rank[self.tp_rank]
        self._gathered = [sum(counts) for counts in by_rank]
        return (
            all_to_all(self.ep_group, rows_S_H, self._received, self._sent),
            all_to_all(self.ep_group, weights_S, self._received, self._sent),
        )

    def dispatch_postprocess(
        self, rows: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the hidden states of the pairs that this rank computes, how many each expert has, and their weights."""
        if self._is_single_rank:
            return rows, self._counts, weights
        if self.tp_size > 1:
            options = {"group": self.tp_group, "output_split_sizes": self._gathered}
            rows = gather_from_sequence_parallel_region(rows, **options)
            weights = gather_from_sequence_parallel_region(weights, **options)
        counts = self._counts_Q_P_E.flatten()
        experts = torch.arange(self._counts_Q_P_E.shape[-1], device=rows.device)
        experts = experts.repeat(self.ep_size * self.tp_size)
        expert_R = experts.repeat_interleave(counts, output_size=len(rows))
        self._order_R = expert_R.argsort(stable=True)
        self._inverse_R = self._order_R.argsort()
        rows_R_H = _spread(rows, self._order_R, self._inverse_R[:, None])
        return rows_R_H, self._counts, weights.index_select(0, self._order_R)

    def combine_preprocess(self, rows_R_H: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs in the order in which the pairs arrived, added up over tensor-parallel ranks."""
        if self._is_single_rank:
            return rows_R_H
        rows = _spread(rows_R_H, self._inverse_R, self._order_R[:, None])
        if self.tp_size > 1:
            options = {"group": self.tp_group, "input_split_sizes": self._gathered}
            rows = reduce_scatter_to_sequence_parallel_region(rows.float(), **options).to(rows.dtype)
        return rows

    def token_combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the pairs to the ranks of their tokens."""
        if not self._is_single_rank:
            rows = all_to_all(self.ep_group, rows, self._sent, self._received)
        return rows

    def combine_postprocess(self, rows_S_H: torch.Tensor) -> torch.Tensor:
        """Add up the experts of each token."""
        return _add_up(rows_S_H, self._token_S, self._place_T_K).view(self._shape)


def _spread(rows: torch.Tensor, token_S: torch.Tensor, place_T_K: torch.Tensor) -> torch.Tensor:
    apply: Any = _Spread.apply
    spread: torch.Tensor = apply(rows, token_S, place_T_K)
    return spread


def _add_up(rows: torch.Tensor, token_S: torch.Tensor, place_T_K: torch.Tensor) -> torch.Tensor:
    apply: Any = _Collect.apply
    sums: torch.Tensor = apply(rows, token_S, place_T_K)
    return sums


class _Spread(torch.autograd.Function):
    """Rows ``[T, H]`` at ``token_S``; the backward pass adds up the gradients at ``place_T_K``."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, token_S: torch.Tensor, place_T_K: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(token_S, place_T_K)
        return rows.index_select(0, token_S)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _collect(gradient, ctx.saved_tensors[1]), None, None


class _Collect(torch.autograd.Function):
    """The sums of rows ``[S, H]`` at ``place_T_K``: the reverse of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, token_S: torch.Tensor, place_T_K: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(token_S)
        return _collect(rows, place_T_K)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.index_select(0, ctx.saved_tensors[0]), None, None


def _collect(rows: torch.Tensor, place_T_K: torch.Tensor) -> torch.Tensor:
    """Add up rows, in float32, in an order that does not change from run to run."""
    gathered = rows.index_select(0, place_T_K.flatten())
    return gathered if place_T_K.shape[1] == 1 else gathered.view(*place_T_K.shape, -1).sum(1)


class _HostCopy:
    """An asynchronous copy of integers to the host."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._host = numbers
        self._event: Any = None
        if numbers.device.type == "cuda":
            self._host = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
            event: Any = torch.cuda.Event
            self._event = event()
            self._event.record()

    def read(self) -> list[int]:
        """Wait for the copy, and return the numbers."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[int] = self._host.tolist()
        return numbers
