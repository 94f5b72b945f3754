"""Weights of a model in Megatron-Core's distributed checkpoints (``torch_dist``), which load under any layout."""

from __future__ import annotations

import json
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async

from agentrl.core.errors import ModelError
from agentrl.learner.megatron.model import MegatronModel

METADATA = "metadata.json"
"""What Megatron-Core writes last."""


def is_distributed_checkpoint(folder: Path) -> bool:
    """Return whether a folder holds a distributed checkpoint of Megatron-Core."""
    try:
        found = json.loads((folder / METADATA).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "sharded_backend" in found


def sharded_weights(model: MegatronModel) -> dict[str, Any]:
    """Return the descriptions of this rank's weights, by chunk, as Megatron-Core names chunks."""
    names = ["model"] if len(model.chunks) == 1 else [f"model{number}" for number in range(len(model.chunks))]
    return {name: chunk.sharded_state_dict() for name, chunk in zip(names, model.chunks, strict=True)}


def save_sharded(state: dict[str, Any], folder: Path) -> None:
    """Write a sharded state into an empty folder, each rank its part. Returns when all is written. Collective."""
    # Otherwise each rank would start a process that imports torch, only to hold the queue of what was written.
    filesystem_async._results_queue = Queue()
    dist_checkpointing.save(state, str(folder))


def save_distributed(model: MegatronModel, folder: Path) -> None:
    """Write the weights into an empty folder, each rank its part. Collective."""
    save_sharded(sharded_weights(model), folder)


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
        found = dist_checkpointing.load(weights, str(folder))
        for chunk, name in zip(model.chunks, weights, strict=True):
            chunk.load_state_dict(found[name])
    except (dist_checkpointing.core.CheckpointingException, KeyError, RuntimeError, OSError) as error:
        raise ModelError(
            f"{key}={folder}: its weights are not those of the model in its config.json: {error}"
        ) from error
