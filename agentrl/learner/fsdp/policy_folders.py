"""PEFT folders in a checkpoint: the LoRA adapters of each policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from agentrl.config.learner import LoraConfig
from agentrl.distributed.base import tensor_spec
from agentrl.learner.fsdp.gather import MergedWeights
from agentrl.learner.fsdp.weights import local, shard_slices
from agentrl.models.peft_folder import ADAPTERS, write_peft_config
from agentrl.models.weight_writer import WeightWriter


class PolicyFolders:
    """Writes a PEFT folder for each policy: every rank its shards of the staged adapters. Without LoRA there is none.

    Args:
        weights: of the rank.
        config: of the adapters; None without.
        staged: returns the copy of an adapter on the CPU.
        folder: of all PEFT folders.
    """

    def __init__(
        self,
        weights: MergedWeights,
        config: LoraConfig | None,
        staged: Callable[[torch.Tensor], torch.Tensor],
        folder: Path,
    ) -> None:
        self._parts: list[tuple[WeightWriter, str, torch.Tensor]] = []
        for policy, names in weights.exported.items():
            assert config is not None, "it has adapters"
            adapters = {name: weights.adapters[inner] for name, inner in names.items()}
            specs = [tensor_spec(*adapter) for adapter in adapters.items()]
            writer = WeightWriter(folder / policy, specs, single=ADAPTERS)
            if dist.get_rank() == 0:
                (folder / policy).mkdir(parents=True)
                writer.create()
                write_peft_config(folder / policy, config, [*adapters])
            self._parts += [(writer, name, staged(weight)) for name, weight in adapters.items()]

    def write(self) -> None:
        """Write this rank's shards."""
        for writer, name, weight in self._parts:
            if local(weight).numel() and (isinstance(weight, DTensor) or dist.get_rank() == 0):
                writer.write(name, local(weight), shard_slices(weight)[0].start)
