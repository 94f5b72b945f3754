"""Gathering of sharded weights: one collective for many of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import torch
from torch.distributed.tensor import DTensor, Shard

_PART_BYTES = 256 << 20
"""Weights of one collective, at least one; further memory as large is needed for it."""
_ALIGNMENT = 16

_Pair = tuple[torch.Tensor, torch.Tensor]
"""A weight, and the tensor that it is written into."""
_Shards = tuple[DTensor, torch.Tensor]


def gather_weights(pairs: Iterable[_Pair]) -> None:
    """Write whole weights, cast, into other tensors on the same device. Collective: all ranks call it with the same weights."""
    there, sharded = [], []
    for weight, out in pairs:
        if not isinstance(weight, DTensor):
            there.append((weight, out))
        elif weight.device_mesh.size() == 1:
            there.append((weight.to_local(), out))
        else:
            assert weight.placements == (Shard(0),), weight.placements
            sharded.append((weight, out))
    copy_all(there)
    for part in _parts(sharded):
        _all_gather(part)


def copy_all(pairs: Sequence[_Pair]) -> None:
    """Copy each first tensor into the second: on a GPU a few kernels for all of them, if their dtypes are alike."""
    if pairs:
        torch._foreach_copy_([out for _, out in pairs], [source for source, _ in pairs])


def _parts(pairs: Sequence[_Shards]) -> Iterator[list[_Shards]]:
    part: list[_Shards] = []
    size = 0
    for pair in pairs:
        size += pair[1].nbytes
        if part and size > _PART_BYTES:
            yield part
            part, size = [], pair[1].nbytes
        part.append(pair)
    if part:
        yield part


def _all_gather(part: Sequence[_Shards]) -> None:
    """Gather shards through two buffers in which each begins at the same place on every rank."""
    mesh, device = part[0][0].device_mesh, part[0][1].device
    # As FSDP divides: the same number of rows for each rank, fewer or none for the last ones.
    rows = [max(-(-len(out) // mesh.size()), 1) for _, out in part]
    sizes = [count * out[:1].nbytes for count, (_, out) in zip(rows, part, strict=True)]
    begins = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
    own = torch.empty(begins[-1], dtype=torch.uint8, device=device)

    def at(flat: torch.Tensor, begin: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return flat[begin : begin + like.numel() * dtype.itemsize].view(dtype).view(like.shape)

    shards = [(weight.to_local(), out.dtype) for weight, out in part]
    copy_all([(shard, at(own, begin, shard, dtype)) for (shard, dtype), begin in zip(shards, begins, strict=False)])
    found = DTensor.from_local(own, mesh, (Shard(0),), run_check=False).full_tensor()
    ranks = found.chunk(mesh.size())
    copies = []
    for (_, out), count, begin in zip(part, rows, begins, strict=False):
        for flat, piece in zip(ranks, torch.split(out, count), strict=False):
            copies.append((at(flat, begin, piece, out.dtype), piece))
    copy_all(copies)
