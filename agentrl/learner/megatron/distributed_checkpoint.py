"""Weights of a model in Megatron-Core's distributed checkpoints (``torch_dist``), which load under any layout."""

from __future__ import annotations

import json
from inspect import unwrap
from pathlib import Path
from queue import Queue
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from agentrl.core.atomic_files import names_file
from agentrl.core.errors import LearnerError, ModelError
from agentrl.learner.megatron.model import MegatronModel

METADATA = "metadata.json"
"""The file that Megatron-Core writes last."""
_FORMAT = CheckpointingConfig("torch_dist", 1)


def is_distributed_checkpoint(folder: Path) -> bool:
    """Return whether a folder holds a distributed checkpoint of Megatron-Core."""
    try:
        metadata = json.loads((folder / METADATA).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(metadata, dict) and "sharded_backend" in metadata


def sharded_weights(model: MegatronModel) -> dict[str, Any]:
    """Return the descriptions of this rank's weights, by chunk, as Megatron-Core names chunks."""
    names = ["model"] if len(model.chunks) == 1 else [f"model{number}" for number in range(len(model.chunks))]
    return {name: chunk.sharded_state_dict() for name, chunk in zip(names, model.chunks, strict=True)}


class _Planning(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Keeps the writer and the metadata of the planned checkpoint."""

    planned: tuple[Any, Any]

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any) -> Any:
        self.planned = (writer, planned[1])
        return super()._get_save_and_finalize_callbacks(writer, planned)


class ShardedFiles:
    """A sharded state to be written into an empty folder, each rank its part. Construction is collective.

    Megatron-Core itself would write in forks of this process, and exchange the write results in the training's process group.

    Args:
        state: descriptions of tensors. Those on the CPU must keep their contents until all is written.
        folder: exists.
    """

    def __init__(self, state: dict[str, Any], folder: Path) -> None:
        # Otherwise each rank would start a process that imports torch, only for the queue of write results.
        filesystem_async._results_queue = Queue()
        planning = _Planning(_FORMAT.sharded_backend, _FORMAT.sharded_backend_version)
        dist_checkpointing.save(state, str(folder), planning, async_sharded_save=True)
        self._folder = folder
        self._writer, self._metadata = planning.planned

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """Write this rank's part, then on rank 0 the metadata that completes the checkpoint. Collective, in any thread.

        Args:
            group: of all ranks, on the CPU, in which no other thread communicates.

        Raises:
            LearnerError: another rank could not write its part.
            OSError: this rank could not.
        """
        fault: Exception | None = None
        written: list[Any] = []
        try:
            with names_file(self._folder):
                written = self._write_part()
        except Exception as error:
            fault = error
        rank_outcomes: list[Any] = [None] * dist.get_world_size()
        is_first = dist.get_rank() == 0
        dist.gather_object((written, fault and str(fault)), rank_outcomes if is_first else None, group=group)
        faults = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(rank_outcomes) if text] if is_first else []
        if is_first and not faults:
            try:
                with names_file(self._folder):
                    self._writer.finish(self._metadata, [results for results, _ in rank_outcomes])
                    save_config(_FORMAT, str(self._folder))
            except Exception as error:
                fault, faults = error, [f"rank 0: {error}"]
        outcome = [faults]
        dist.broadcast_object_list(outcome, src=0, group=group)
        if fault is not None:
            raise fault
        if outcome[0]:
            raise LearnerError(f"{self._folder} could not be written by {'; '.join(outcome[0])}")

    def _write_part(self) -> list[Any]:
        """Write this rank's files, and return Megatron-Core's description of their contents."""
        # Without the decorator, which switches the garbage collection of the whole process off.
        write = unwrap(filesystem_async.FileSystemWriterAsync.write_preloaded_data)
        results: Queue[Any] = Queue()
        numbers: Queue[int] = Queue()
        write_results = []
        for number, bucket in enumerate(self._writer.write_buckets):
            numbers.put(number)
            write([self._writer.transforms], number, bucket, results, numbers, use_fsync=True)
            _, written = results.get()
            if isinstance(written, Exception):
                raise written
            write_results += written
        return write_results


def save_distributed(model: MegatronModel, folder: Path) -> None:
    """Write the weights into an empty folder, each rank its part. Collective."""
    ShardedFiles(sharded_weights(model), folder).write()


@torch.no_grad()
def load_distributed(model: MegatronModel, folder: Path, key: str) -> None:
    """Read this rank's part of the weights. Collective.

    Args:
        model: its weights are overwritten.
        folder: a distributed checkpoint.
        key: configuration key or argument of the folder, for messages.

    Raises:
        ModelError: it is of another model, or damaged.
    """
    try:
        weights = sharded_weights(model)
        loaded = dist_checkpointing.load(weights, str(folder))
        for chunk, name in zip(model.chunks, weights, strict=True):
            chunk.load_state_dict(loaded[name])
    except (dist_checkpointing.core.CheckpointingException, KeyError, RuntimeError, OSError) as error:
        raise ModelError(
            f"{key}={folder}: its weights are not those of the model in its config.json: {error}"
        ) from error
