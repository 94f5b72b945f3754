"""Collectives with gradients, as custom operations that torch.compile does not look into.

The first dimension of tensors is divided among the ranks of a group. ``group`` is the name of a process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group


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


def _exchange_back(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return exchange(gradient, ctx.group), None


exchange.register_autograd(_exchange_back, setup_context=_keep_group)
