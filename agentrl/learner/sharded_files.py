"""State in the format of ``torch.distributed.checkpoint``: each rank writes the boxes of tensors that it has, and reads those
that it needs.

A box is a part of a tensor from some index on in each dimension. Boxes that several ranks have are written by one of them, so
that the ranks write about as much each.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import override

from agentrl.core.atomic_files import names_file
from agentrl.core.errors import LearnerError


class Box(NamedTuple):
    """A part of a tensor."""

    offsets: tuple[int, ...]
    """The index of its first element in the whole tensor."""
    tensor: torch.Tensor
    """Its contents, which a load overwrites."""


class TensorBoxes:
    """A tensor of a checkpoint, and the boxes of it that this rank has; at least one.

    Those of all ranks that save make up the tensor, each element once or in equal boxes. Those of a rank that loads may overlap.
    """

    def __init__(self, shape: Sequence[int], boxes: Sequence[Box]) -> None:
        self._shape = torch.Size(shape)
        self._boxes = boxes

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        return self._shape

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets, index),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(dtype=box.tensor.dtype), self._shape),
            )
            for index, (box, chunk) in enumerate(zip(self._boxes, self.__create_chunk_list__(), strict=True))
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), box.tensor.size()) for box in self._boxes]

    def find(self, index: MetadataIndex) -> torch.Tensor:
        """Return a box: of a load by its number, of a save by its offsets, as it has another number in the plan of all ranks."""
        offsets, number = tuple(index.offset or ()), index.index or 0
        if number < len(self._boxes) and self._boxes[number].offsets == offsets:
            return self._boxes[number].tensor
        return next(box.tensor for box in self._boxes if box.offsets == offsets)


class _SavePlanner(DefaultSavePlanner):
    @override
    def lookup_object(self, index: MetadataIndex) -> Any:
        tensor = self.state_dict[index.fqn]
        return tensor.find(index) if isinstance(tensor, TensorBoxes) else super().lookup_object(index)


class _LoadPlanner(DefaultLoadPlanner):
    @override
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        boxes = {name: tensor for name, tensor in state_dict.items() if isinstance(tensor, TensorBoxes)}
        values = {name: value for name, value in state_dict.items() if name not in boxes}
        super().set_up_planner(values, metadata, is_coordinator)
        self.state_dict = {**self.state_dict, **boxes}

    @override
    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        tensor = self.state_dict[index.fqn]
        return tensor.find(index) if isinstance(tensor, TensorBoxes) else super().lookup_tensor(index)


def flat_boxes(shape: Sequence[int], start: int, flat: torch.Tensor) -> Iterator[Box]:
    """Divide consecutive elements of a tensor, such as those of a rank that divides it as one row of numbers, into boxes.

    Args:
        shape: of the tensor.
        start: the first element's position in the flattened tensor.
        flat: the elements; boxes are views of them.
    """
    stop = start + len(flat)
    if start == stop:
        return
    if len(shape) < 2:
        yield Box((start,) * len(shape), flat.view(-1 if shape else ()))
        return
    row_size = math.prod(shape[1:])
    first, last = start // row_size, (stop - 1) // row_size
    if first == last and stop - start < row_size:
        for offsets, tensor in flat_boxes(shape[1:], start - first * row_size, flat):
            yield Box((first, *offsets), tensor[None])
        return
    head = -start % row_size
    rows = (stop - start - head) // row_size
    middle = head + rows * row_size
    yield from flat_boxes(shape, start, flat[:head])
    if rows:
        yield Box(((start + head) // row_size, *([0] * (len(shape) - 1))), flat[head:middle].view(rows, *shape[1:]))
    yield from flat_boxes(shape, start + middle, flat[middle:])


class _Files(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with names_file(Path(path)), super().create_stream(path, mode) as stream:
            yield stream


def save_sharded(state: dict[str, Any], folder: Path, group: dist.ProcessGroup) -> None:
    """Write a state, each rank its boxes; fails on all ranks of ``group`` together. Collective, in any thread.

    Args:
        state: tensors by name, also nested: `DTensor` or `TensorBoxes`.
        folder: is created.
        group: of all ranks, on the CPU, in which no other thread communicates.

    Raises:
        OSError: a rank could not write a file, which is named.
        LearnerError: a rank failed otherwise.
    """
    writer = FileSystemWriter(folder)
    writer.fs = _Files()
    try:
        save(state, storage_writer=writer, planner=_SavePlanner(), process_group=group)
    except CheckpointException as error:  # no Exception
        faults = {rank: fault for rank, (fault, _) in error.failures.items()}
        for fault in faults.values():
            if isinstance(fault, OSError):
                raise fault from None
        rank, fault = next(iter(faults.items()))
        raise LearnerError(f"{folder} could not be written by rank {rank}: {type(fault).__name__}: {fault}") from error


def load_sharded(state: Mapping[str, Any], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Read this rank's boxes of a state, cast. Collective.

    Args:
        state: tensors by name, which are overwritten; those of the folder may be more.
        folder: that `save_sharded` wrote.
        group: of all ranks; None is the default one.

    Raises:
        CheckpointException: a file is damaged, or the folder lacks a tensor or has it in another shape.
    """
    load(dict(state), checkpoint_id=folder, planner=_LoadPlanner(), process_group=group)
