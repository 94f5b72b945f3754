"""Weights on their way out: in buckets, each of them one piece of memory of which the weights are views."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from agentrl.distributed.base import TensorSpec
from agentrl.learner.base import WeightSource
from agentrl.learner.export.cuda_ipc import SharedMemory

ALIGNMENT = 16
"""Bytes. Each weight begins at a multiple, which kernels that move several numbers at once want."""


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Return what a tensor is."""
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


@dataclass(frozen=True, slots=True)
class Plan:
    """What a bucket holds."""

    specs: tuple[TensorSpec, ...]
    """In order."""
    size: int
    """Bytes, with what aligns the weights."""
    last: bool
    """Whether no bucket follows."""


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[Plan]:
    """Divide weights into buckets of at most ``bucket_bytes``; a larger one makes one of its own."""
    parts: list[tuple[list[TensorSpec], int]] = []
    for spec in specs:
        if parts:
            chosen, size = parts[-1]
            end = _aligned(size) + _bytes(spec)
            if end <= bucket_bytes:
                parts[-1] = ([*chosen, spec], end)
                continue
        parts.append(([spec], _bytes(spec)))
    return [Plan(tuple(chosen), size, chosen is parts[-1][0]) for chosen, size in parts]


def views(specs: Sequence[TensorSpec], flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the weights that lie one after the other in ``flat``, bytes."""
    found = []
    offset = 0
    for spec in specs:
        part = flat[offset : offset + _bytes(spec)]
        found.append((spec.name, part.view(getattr(torch, spec.dtype)).view(spec.shape)))
        offset = _aligned(offset + _bytes(spec))
    return found


class RankBucket:
    """What a rank holds of the weights. Valid until the next one is asked for."""

    def __init__(self, plan: Plan, memory: SharedMemory) -> None:
        """Take over what lies in ``memory``."""
        self.specs = plan.specs
        self.last = plan.last
        self._size = plan.size
        self._memory = memory

    def held(self) -> list[tuple[str, torch.Tensor]]:
        """Return the weights where they are."""
        return views(self.specs, self._memory.flat)

    def on_cpu(self) -> torch.Tensor:
        """Return the weights as bytes on the CPU, which the next bucket overwrites."""
        return self._memory.on_cpu(self._size)

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the weights on the CPU, where the next bucket overwrites them."""
        return views(self.specs, self.on_cpu())

    def save(self, file: Path) -> None:
        """Write the weights as safetensors."""
        save_file(dict(self.tensors()), file, metadata={"format": "pt"})

    def share(self) -> str:
        """Return what opens the weights in another process on this GPU; see `HeldBucket.share`."""
        return self._memory.handles(self.held())


def held_buckets(source: WeightSource, bucket_bytes: int, dtype: str | None) -> Iterator[RankBucket]:
    """Iterate over buckets, all in the same memory. Collective: every rank takes every bucket."""
    specs = [replace(spec, dtype=dtype or spec.dtype) for spec in source.specs()]
    plans = plan_buckets(specs, bucket_bytes)
    if not plans:
        return
    memory = SharedMemory.of(max(plan.size for plan in plans), source.gathers_on)
    for plan in plans:
        bucket = RankBucket(plan, memory)
        for name, view in bucket.held():
            view.copy_(source.whole(name, view.dtype))
        yield bucket


class NamedTensors:
    """Implements `WeightSource` over tensors at hand."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Read ``tensors`` anew for every bucket, so that they may change."""
        self.tensors = tensors

    @property
    def gathers_on(self) -> torch.device:
        """Return where the tensors are."""
        return next(iter(self.tensors.values())).device

    def specs(self) -> Sequence[TensorSpec]:
        """Return what they are."""
        return [spec_of(*item) for item in self.tensors.items()]

    def whole(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return one, cast."""
        return self.tensors[name].detach().to(dtype)


def _bytes(spec: TensorSpec) -> int:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return math.prod(spec.shape) * dtype.itemsize


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
