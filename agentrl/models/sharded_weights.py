"""The weights of a checkpoint that has no Hugging Face folder of them, read tensor by tensor in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from agentrl.core.errors import CheckpointError
from agentrl.core.reading import reading
from agentrl.distributed.base import TensorSpec
from agentrl.models.weight_files import WeightFiles
from agentrl.models.weight_writer import DRAFTS

if TYPE_CHECKING:
    import torch

WEIGHTS = "weights"
"""Folder of a checkpoint with weights in the format of ``torch.distributed.checkpoint``, by Hugging Face name."""
POLICIES = "policies"
"""Folder of a checkpoint with a PEFT folder for each policy that is trained with LoRA."""
DESCRIPTION = "learner.json"
"""The learner's description of a checkpoint. ``base`` is the folder of the weights that its LoRA adapters are for."""


class Weights(Protocol):
    """Weights by Hugging Face name."""

    def specs(self) -> list[TensorSpec]:
        """Return names, dtypes and shapes of all weights."""

    def read(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """Return a part of a weight, on the CPU; without ``slices`` the whole weight."""


class ShardedWeights:
    """The weights in a folder that the ranks of a learner wrote, each its parts of them. One weight at a time is in memory.

    Raises:
        CheckpointError: the folder's description is damaged.
    """

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self._folder = folder
        self._reader = FileSystemReader(folder)
        with reading(folder / ".metadata", "description of sharded weights", CheckpointError):
            self._metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            self._specs = {
                name: TensorSpec(name, str(tensor.properties.dtype).removeprefix("torch."), tuple(tensor.size))
                for name, tensor in self._metadata.state_dict_metadata.items()
                if isinstance(tensor, TensorStorageMetadata)
            }

    def specs(self) -> list[TensorSpec]:
        """Return names, dtypes and shapes of all weights, by name."""
        return [self._specs[name] for name in sorted(self._specs)]

    def read(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """Return a part of a weight, on the CPU; without ``slices`` the whole weight.

        Raises:
            CheckpointError: a file is damaged.
        """
        import torch
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        spec = self._specs[name]
        weight = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner({name: weight}, self._metadata, is_coordinator=True)
        with reading(self._folder, f"folder with {name}", CheckpointError):
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        return weight[slices]


def is_sharded(model: Path) -> bool:
    """Return whether a folder is ``model/`` of a checkpoint that was written without a Hugging Face folder of its weights."""
    checkpoint = model.parent
    has_weights = (checkpoint / WEIGHTS).is_dir() or (checkpoint / POLICIES).is_dir()
    return has_weights and not any(model.glob("*.safetensors"))


def sharded_weights(checkpoint: Path) -> list[Weights]:
    """Return the weights of a checkpoint without a Hugging Face folder of them; of one with LoRA those of the base model.

    Raises:
        CheckpointError: it has no weights, or its description is damaged.
        ModelError: the base model is gone, or its files are damaged.
    """
    if (checkpoint / WEIGHTS).is_dir():
        return [ShardedWeights(checkpoint / WEIGHTS), WeightFiles(checkpoint / DRAFTS, "export")]
    with reading(checkpoint / DESCRIPTION, "description of a whole checkpoint", CheckpointError):
        base = json.loads((checkpoint / DESCRIPTION).read_bytes()).get("base")
    if base is None:
        raise CheckpointError(f"{checkpoint} has no weights: neither {WEIGHTS}/ nor safetensors files in model/")
    return [WeightFiles(Path(base), "base model of the checkpoint")]
