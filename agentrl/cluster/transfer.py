"""Batches as NumPy arrays, which Ray moves between processes without pickling their contents."""

from __future__ import annotations

import warnings
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.batch.microbatch import MicroBatch
from agentrl.learner.base import RankBatch

Packed = dict[str, Any]


def pack_batch(batch: RankBatch) -> Packed:
    """Return a rank's batch as arrays."""
    micro = [{field.name: _plain(getattr(part, field.name)) for field in fields(part)} for part in batch.micro]
    rest = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "micro"}
    return {"micro": micro, **rest}


def unpack_batch(packed: Packed) -> RankBatch:
    """Return the batch that `pack_batch` took apart; its tensors are views of memory that must not be written to."""
    micro = []
    for part in packed["micro"]:
        values: Packed = {name: as_tensor(v) if isinstance(v, np.ndarray) else v for name, v in part.items()}
        micro.append(MicroBatch(**values))
    return RankBatch(**(packed | {"micro": tuple(micro)}))


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return a view of ``array``; torch warns of memory that Ray gives out read-only, and nobody here writes to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _plain(value: Any) -> Any:
    return value.numpy() if isinstance(value, torch.Tensor) else value
