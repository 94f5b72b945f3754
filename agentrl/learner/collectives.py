"""Collectives with gradients, each one operation for a compiler, which computes it as it is.

Of tensors the first dimension is divided among the ranks of a group. ``group`` is the name of a process group.
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


@torch.library.custom_op("agentrl::all_gather", mutates_args=(), schema="(Tensor part, int size, str group) -> Tensor")
def all_gather(part: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Return the parts of all ranks, one after the other. Gradients are summed over ranks, each of which gets its part."""
    whole = part.new_empty(size * part.shape[0], *part.shape[1:])
    dist.all_gather_into_tensor(whole, part.contiguous(), group=process_group(group))
    return whole


@all_gather.register_fake
def _(part: torch.Tensor, size: int, group: str) -> torch.Tensor:
    return part.new_empty(size * part.shape[0], *part.shape[1:])


@torch.library.custom_op(
    "agentrl::reduce_scatter", mutates_args=(), schema="(Tensor whole, int size, str group) -> Tensor"
)
def reduce_scatter(whole: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Return this rank's part of the sum over ranks. Gradients are gathered."""
    part = whole.new_empty(whole.shape[0] // size, *whole.shape[1:])
    dist.reduce_scatter_tensor(part, whole.contiguous(), group=process_group(group))
    return part


@reduce_scatter.register_fake
def _(whole: torch.Tensor, size: int, group: str) -> torch.Tensor:
    return whole.new_empty(whole.shape[0] // size, *whole.shape[1:])


@torch.library.custom_op("agentrl::all_reduce", mutates_args=(), schema="(Tensor part, str group) -> Tensor")
def all_reduce(part: torch.Tensor, group: str) -> torch.Tensor:
    """Return the sum over ranks. Its gradient is that of each rank's summand."""
    whole = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, group=process_group(group))
    return whole


@all_reduce.register_fake
def _(part: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(part, memory_format=torch.contiguous_format)


class _WithReducedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, same: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return same.view_as(same)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(gradient, ctx.group), None


def with_reduced_gradient(same: torch.Tensor, group: str) -> torch.Tensor:
    """Return what all ranks have, whose gradient is the sum of theirs."""
    found: torch.Tensor = _WithReducedGradient.apply(same, group)  # type: ignore[no-untyped-call]
    return found


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
    found = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(found, parts.contiguous(), group=process_group(group))
    return found


@exchange.register_fake
def _(parts: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(parts, memory_format=torch.contiguous_format)


def _keep_group(ctx: Any, inputs: Sequence[Any], output: torch.Tensor) -> None:
    _, ctx.group = inputs


def _exchange_back(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return exchange(gradient, ctx.group), None


exchange.register_autograd(_exchange_back, setup_context=_keep_group)
