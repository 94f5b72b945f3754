"""Context parallelism: ranks that compute a micro-batch together, each a part of its tokens (Ulysses, arXiv:2309.14509).

Embeddings, norms, matrix products and scores are computed for each token alone: every rank has those of its part. Before
attention an all-to-all gives each rank all tokens of a part of the heads. After it another one gives each rank all heads of
its part of the tokens.

The first dimension of tensors is divided among the ranks of a group. ``group`` is the name of a process group.

Legend: ``P`` ranks, ``L`` tokens of a micro-batch, ``T`` tokens of a part, ``H`` heads, ``D`` head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

from agentrl.learner.base import RowScores


def process_group(name: Any) -> dist.ProcessGroup:
    """Return the process group of a name."""
    return _resolve_process_group(name)


@torch.library.custom_op("agentrl::all_gather", mutates_args=(), schema="(Tensor shard, int size, str group) -> Tensor")
def all_gather(shard: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Return the shards of all ranks, concatenated. Gradients are summed over ranks, and each rank gets its shard."""
    gathered = shard.new_empty(size * shard.shape[0], *shard.shape[1:])
    dist.all_gather_into_tensor(gathered, shard.contiguous(), group=process_group(group))
    return gathered


@all_gather.register_fake
def _(shard: torch.Tensor, size: int, group: str) -> torch.Tensor:
    return shard.new_empty(size * shard.shape[0], *shard.shape[1:])


@torch.library.custom_op(
    "agentrl::reduce_scatter", mutates_args=(), schema="(Tensor summand, int size, str group) -> Tensor"
)
def reduce_scatter(summand: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Return this rank's shard of the sum over ranks. Gradients are gathered."""
    shard = summand.new_empty(summand.shape[0] // size, *summand.shape[1:])
    dist.reduce_scatter_tensor(shard, summand.contiguous(), group=process_group(group))
    return shard


@reduce_scatter.register_fake
def _(summand: torch.Tensor, size: int, group: str) -> torch.Tensor:
    return summand.new_empty(summand.shape[0] // size, *summand.shape[1:])


@torch.library.custom_op("agentrl::all_reduce", mutates_args=(), schema="(Tensor summand, str group) -> Tensor")
def all_reduce(summand: torch.Tensor, group: str) -> torch.Tensor:
    """Return the sum over ranks. Its gradient is that of each rank's summand."""
    total = summand.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=process_group(group))
    return total


@all_reduce.register_fake
def _(summand: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(summand, memory_format=torch.contiguous_format)


class _WithReducedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(gradient, ctx.group), None


def with_reduced_gradient(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """Return a tensor that all ranks have, with the sum of their gradients as its gradient."""
    identity: torch.Tensor = _WithReducedGradient.apply(tensor, group)  # type: ignore[no-untyped-call]
    return identity


def _keep_sizes(ctx: Any, inputs: Sequence[Any], output: torch.Tensor) -> None:
    _, ctx.size, ctx.group = inputs


all_gather.register_autograd(
    lambda ctx, gradient: (reduce_scatter(gradient, ctx.size, ctx.group), None, None), setup_context=_keep_sizes
)
reduce_scatter.register_autograd(
    lambda ctx, gradient: (all_gather(gradient, ctx.size, ctx.group), None, None), setup_context=_keep_sizes
)
all_reduce.register_autograd(lambda ctx, gradient: (gradient, None))


@torch.library.custom_op("agentrl::exchange", mutates_args=(), schema="(Tensor parts, str group) -> Tensor")
def exchange(parts: torch.Tensor, group: str) -> torch.Tensor:
    """Send ``parts[i]`` to rank ``i`` of a group, and return what the ranks sent, in their order. Collective."""
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=process_group(group))
    return received


@exchange.register_fake
def _(parts: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(parts, memory_format=torch.contiguous_format)


def _keep_group(ctx: Any, inputs: Sequence[Any], output: torch.Tensor) -> None:
    _, ctx.group = inputs


exchange.register_autograd(lambda ctx, gradient: (exchange(gradient, ctx.group), None), setup_context=_keep_group)


@dataclass(frozen=True, slots=True)
class Context:
    """The ranks that compute a micro-batch together."""

    group: str
    """Name of their process group, which compiled layers can take."""
    size: int
    """Number of ranks."""
    rank: int
    """Index of this rank in the group."""

    def token_slice(self, length: int) -> slice:
        """Return this rank's part of a sequence; ``size`` divides its length."""
        tokens = length // self.size
        return slice(self.rank * tokens, (self.rank + 1) * tokens)

    def has(self, places_N: torch.Tensor, length: int) -> torch.Tensor:
        """Return whether places of a sequence are in this rank's part, bools ``[N]``."""
        tokens = self.token_slice(length)
        inside_N: torch.Tensor = (places_N >= tokens.start) & (places_N < tokens.stop)
        return inside_N

    def sum_over_ranks(self, rows: RowScores) -> RowScores:
        """Return the sums over the ranks of their rows, on the first rank; none on the others. Collective."""
        if not rows:
            return {}
        flat = torch.from_numpy(np.concatenate([*rows.values()]))
        dist.all_reduce(flat, group=process_group(self.group))
        if self.rank > 0:
            return {}
        parts = torch.split(flat, [len(row) for row in rows.values()])
        return {key: row_scores.numpy() for key, row_scores in zip(rows, parts, strict=True)}

    def to_heads(self, *states: torch.Tensor) -> list[torch.Tensor]:
        """Return all tokens of this rank's heads, each ``[1, H/P, L, D]``, from all heads of its tokens. Collective.

        Args:
            states: each ``[1, H, T, D]``. If ``P`` does not divide the heads, as with few key heads, they are repeated.
        """
        received = exchange(torch.cat([self._by_heads(state) for state in states], -1), self.group).flatten(0, 1)
        sizes = [self._divisible_heads(state.shape[1]) // self.size * state.shape[3] for state in states]
        return [
            block.view(block.shape[0], -1, state.shape[3]).transpose(0, 1)[None].to(state.dtype)
            for block, state in zip(torch.split(received, sizes, -1), states, strict=True)
        ]

    def _by_heads(self, states: torch.Tensor) -> torch.Tensor:
        """Return states ``[1, H, T, D]`` by the rank that gets the heads, ``[P, T, H/P·D]``."""
        _, heads, tokens, size = states.shape
        if self._divisible_heads(heads) > heads:
            states = states.repeat_interleave(self._divisible_heads(heads) // heads, 1)
        return states.reshape(self.size, -1, tokens, size).transpose(1, 2).flatten(2)

    def _divisible_heads(self, heads: int) -> int:
        """Return the least multiple of ``heads`` that the ranks can divide."""
        return math.lcm(heads, self.size)

    def local_heads(self, values_H: torch.Tensor) -> torch.Tensor:
        """Return a value ``[H]`` of each head for this rank's heads of `to_heads`."""
        repeats = self._divisible_heads(len(values_H)) // len(values_H)
        return values_H.repeat_interleave(repeats).view(self.size, -1)[self.rank]

    def to_tokens(self, attended: torch.Tensor) -> torch.Tensor:
        """Return all heads of this rank's tokens ``[1, T, H, D]`` from all tokens of its heads ``[1, L, H/P, D]``. Collective."""
        received: torch.Tensor = exchange(attended.reshape(self.size, -1, *attended.shape[2:]), self.group)
        return received.transpose(0, 1).flatten(1, 2)[None]


def join_context(size: int, timeout_s: float) -> Context | None:
    """Return the context of this rank, with ``size`` adjacent ranks; None for one. Collective over all ranks.

    Args:
        size: of the context.
        timeout_s: time limit of what the ranks compute together.
    """
    if size == 1:
        return None
    group, _ = dist.new_subgroups(size, timeout=timedelta(seconds=timeout_s))  # type: ignore[no-untyped-call]
    return Context(group.group_name, size, dist.get_rank(group))
