"""Sharded states in the format of torch.distributed.checkpoint, written with errors that name the file."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from agentrl.core.atomic_files import names_file
from agentrl.core.errors import LearnerError


class _Files(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with names_file(Path(path)), super().create_stream(path, mode) as stream:
            yield stream


def save_sharded(state: dict[str, Any], folder: Path, group: dist.ProcessGroup) -> None:
    """Write a state, each rank its shards; fails on all ranks of ``group`` together. Collective.

    Raises:
        OSError: a rank could not write a file, which is named.
        LearnerError: a rank failed otherwise.
    """
    writer = FileSystemWriter(folder)
    writer.fs = _Files()
    try:
        save(state, storage_writer=writer, process_group=group)
    except CheckpointException as error:  # no Exception
        faults = {rank: fault for rank, (fault, _) in error.failures.items()}
        for fault in faults.values():
            if isinstance(fault, OSError):
                raise fault from None
        rank, fault = next(iter(faults.items()))
        raise LearnerError(f"{folder} could not be written by rank {rank}: {type(fault).__name__}: {fault}") from error
