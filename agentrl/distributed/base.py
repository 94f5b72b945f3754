"""Descriptions of weight transfers: the process group and the tensors. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """A ``torch.distributed`` group through which weights go. Example: ``WeightGroup("w1", "127.0.0.1", 29500, 3, "gloo")``."""

    name: str
    """Never used twice, as engines may know the earlier group still."""
    host: str
    """Where its store is."""
    port: int
    """Of the store."""
    size: int
    """Processes in it: the sender, which is rank 0, and those of all engines."""
    backend: str
    """``nccl`` or ``gloo``."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor of a bucket is. Example: ``TensorSpec("model.norm.weight", "float32", (64,))``."""

    name: str
    """Hugging Face's."""
    dtype: str
    """As ``torch`` has it, such as ``bfloat16``."""
    shape: tuple[int, ...]
