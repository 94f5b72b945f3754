"""Descriptions of weight transfers: process group and tensors. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LOAD_FORMAT = "flattened_bucket"
"""SGLang's ``load_format`` of a bucket that is one tensor of bytes; see `agentrl.distributed.flat_bucket`."""


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """A ``torch.distributed`` group for weight transfer. Example: ``WeightGroup("w1", "127.0.0.1", 29500, 3, "gloo")``."""

    name: str
    """Unique, as engines may still know an earlier group."""
    host: str
    """Host of the group's store."""
    port: int
    """Port of the store."""
    size: int
    """Number of processes: the sender, which is rank 0, and those of all engines."""
    backend: str
    """``nccl`` or ``gloo``."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape of a tensor in a bucket. Example: ``TensorSpec("model.norm.weight", "float32", (64,))``."""

    name: str
    """Hugging Face parameter name."""
    dtype: str
    """Name of a torch dtype, such as ``bfloat16``."""
    shape: tuple[int, ...]


def tensor_spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Return name, dtype and shape of a tensor."""
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
