"""Weights in one block of memory, without padding: SGLang's ``load_format=flattened_bucket`` (0.5.17 and 0.5.23)."""

from __future__ import annotations

import base64
import math
import pickle
from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace

import torch

from agentrl.distributed.base import TensorSpec, tensor_spec

ALIGNMENT = 16
"""Bytes. Vectorized copies need weights that begin at a multiple of it."""


LARGE_WEIGHTS = 16 * 2**20
"""Bytes. Weights of this mean size take longer to join than to broadcast one by one: SGLang 0.5.17 joins the weights of a
flat bucket in memory before it receives them."""


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """Return the dtype of a weight."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def total_bytes(*specs: TensorSpec) -> int:
    """Return the size of weights in bytes."""
    return sum(math.prod(spec.shape) * torch_dtype(spec).itemsize for spec in specs)


def broadcast_as_one(specs: Sequence[TensorSpec]) -> bool:
    """Return whether a bucket is broadcast as one tensor of bytes; else weight by weight, in the order of ``specs``.

    Float8 weights always are: gloo does not know them.
    """
    return any(spec.dtype.startswith("float8") for spec in specs) or total_bytes(*specs) < len(specs) * LARGE_WEIGHTS


def order_by_alignment(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return the weights in the order in which they follow each other without padding.

    A weight of which `ALIGNMENT` divides the size begins at a multiple of it, and every weight at a multiple of its item
    size: those with the larger power of two in their size come first, otherwise the order is kept.
    """
    return tuple(sorted(specs, key=_power_of_two, reverse=True))


def views(specs: Sequence[TensorSpec], flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the weights in ``flat``, uint8 bytes in which they follow each other in the order of `order_by_alignment`."""
    sizes = list(map(total_bytes, specs))
    weights = flat[: sum(sizes)].split_with_sizes(sizes)
    return [
        (spec.name, weight.view(torch_dtype(spec)).view(spec.shape))
        for spec, weight in zip(specs, weights, strict=True)
    ]


def serialize(flat: object, specs: Sequence[TensorSpec]) -> str:
    """Return a bucket as SGLang's ``/update_weights_from_tensor`` takes it: a pickle in base64.

    Args:
        flat: pickles as the uint8 tensor of all weights.
        specs: the weights, in the order of `order_by_alignment`.
    """
    ends = list(accumulate(map(total_bytes, specs)))
    # SGLang reads attributes, and its unpickler lets this class pass; that of SGLang need not be installed here.
    metadata = [
        SimpleNamespace(
            name=spec.name, shape=spec.shape, dtype=torch_dtype(spec), start_idx=begin, end_idx=end, numel=end - begin
        )
        for spec, begin, end in zip(specs, [0, *ends], ends, strict=False)
    ]
    return base64.b64encode(pickle.dumps({"flattened_tensor": flat, "metadata": metadata})).decode()


def serialize_tensors(named: Sequence[tuple[str, torch.Tensor]]) -> str:
    """Return tensors as a bucket by value; see `serialize`."""
    return serialize(*join_tensors(named))


def join_tensors(named: Sequence[tuple[str, torch.Tensor]]) -> tuple[torch.Tensor, tuple[TensorSpec, ...]]:
    """Return copies of tensors in one block of uint8 bytes on the CPU, in the order of `order_by_alignment`, and their specs."""
    # Sharing a CPU tensor by file descriptor crashes SGLang's scheduler. A view would carry its whole storage.
    tensors = dict(named)
    specs = order_by_alignment([tensor_spec(*item) for item in tensors.items()])
    flat = torch.empty(total_bytes(*specs), dtype=torch.uint8)
    for name, view in views(specs, flat):
        view.copy_(tensors[name].detach())
    return flat, specs


def _power_of_two(spec: TensorSpec) -> int:
    size = total_bytes(spec)
    return min(size & -size, ALIGNMENT) if size else ALIGNMENT
