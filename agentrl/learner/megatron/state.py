"""Checkpoints of a Megatron-Core rank.

::

    folder/
      model/         Hugging Face folder: safetensors in the learner's precision, configuration, the tokenizer's files
      megatron/      Megatron-Core's distributed format (torch_dist): float32 weights and moments, and a changed reference
      random/        one file per rank: torch, CUDA, NumPy and Python states
      learner.json   finished steps, number of ranks, shapes of weights, frozen weights

A checkpoint loads with any tensor, pipeline, expert and data parallel sizes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from agentrl.config.learner import LearnerConfig
from agentrl.core.atomic_files import names_file
from agentrl.core.background import run_in_daemon_thread
from agentrl.core.errors import CheckpointError
from agentrl.core.reading import reading
from agentrl.distributed.base import TensorSpec
from agentrl.learner.export import plan_buckets
from agentrl.learner.megatron.distributed_checkpoint import ShardedFiles
from agentrl.learner.megatron.fixes import SHARDING
from agentrl.learner.megatron.policies import LoadedModel, Training
from agentrl.learner.megatron.weights import GatherGroups
from agentrl.learner.random_states import rank_states, restore_rank, save_rank_states
from agentrl.models.export import copy_other_files
from agentrl.models.reference_policy import CRITIC_KEY
from agentrl.models.weight_writer import DraftLayers, WeightWriter

_BUCKET_BYTES = 256 << 20
"""Weights that are gathered at a time."""


class SavedRank(Protocol):
    """The state of a rank that is saved and loaded."""

    config: LearnerConfig
    device: torch.device
    model_folder: Path
    """The model folder that the rank was loaded from; its other files are copied."""
    trained: LoadedModel
    training: Training
    reference: LoadedModel | None
    reference_changed: bool
    """Whether the reference has been replaced by the policy of an earlier step."""
    step: int
    """Finished optimizer steps."""

    writers: Writers

    def readable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the state in readable memory."""

    def cpu_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the CPU copy of a tensor of the state, which no step changes; copy other tensors to the CPU."""


@dataclass(frozen=True, slots=True)
class Writers:
    """Process groups of the threads that write checkpoints."""

    everyone: dist.ProcessGroup
    weights: GatherGroups

    @classmethod
    def join(cls) -> Writers:
        """Create the groups. Collective."""
        return cls(dist.new_group(backend="gloo"), GatherGroups.with_rank_0())


def start_saving(rank: SavedRank, folder: Path) -> Future[None]:
    """Start to write the state, whose tensors have been copied. Collective.

    The future is done when this rank has written its part.
    """
    model = rank.trained.model
    drafts = None if model.values else DraftLayers(rank.model_folder, model.config.num_layers, "model.path")
    writer = WeightWriter(folder / "model", [*rank.trained.weights.specs(), *(drafts.specs if drafts else ())])
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(folder, ignore_errors=True)
        with names_file(folder):
            for name in ("model", "megatron", "random"):
                (folder / name).mkdir(parents=True)
            copy_other_files(rank.model_folder, folder / "model")
            _copy_config(rank, folder / "model")
            writer.create()
            (folder / "learner.json").write_text(json.dumps(_description(rank), indent=1), encoding="utf-8")
    dist.barrier()
    with rank.training.reading(rank.readable):
        state = _sharded_state(rank, loading=False)
    dict_list_map_inplace(lambda shard: _move_to_cpu(shard, rank.cpu_copy), state)
    files = ShardedFiles(state, folder / "megatron")
    states = rank_states(rank.device)

    def write() -> None:
        files.write(rank.writers.everyone)
        _write_model(rank, writer)
        if drafts is not None and first:
            drafts.write(writer)
        save_rank_states(states, folder / "random")

    return run_in_daemon_thread(write, "checkpoint")


def _write_model(rank: SavedRank, writer: WeightWriter) -> None:
    """Gather the weights on rank 0, which writes them."""
    groups = rank.writers.weights
    if all(dist.get_rank(group) < 0 for group in (groups.layers, groups.experts)):
        return
    fault: OSError | None = None
    for bucket_plan in plan_buckets(rank.trained.weights.specs(), _BUCKET_BYTES):
        into = [_empty(spec) for spec in bucket_plan.specs]
        rank.trained.weights.gather(into, groups, rank.cpu_copy)
        if dist.get_rank() == 0 and fault is None:
            try:
                for name, tensor in into:
                    writer.write(name, tensor)
            except OSError as error:
                fault = error  # other ranks still send their weights
    if fault is not None:
        raise fault


def load_state(rank: SavedRank, folder: Path) -> None:
    """Load weights, optimizer and random states. Collective.

    Raises:
        CheckpointError: see `LearnerRank.load`.
    """
    description, expected = _read_description(folder), _description(rank)
    path = CRITIC_KEY if rank.trained.model.values else "model.path"
    for key, setting in (("shapes", path), ("frozen", "learner.freeze")):
        if description[key] != expected[key]:
            name = min(name for name, _ in {*_items(description[key])} ^ {*_items(expected[key])})
            raise CheckpointError(f"{folder} was written with another {key} of weights, such as {name} ({setting})")
    rank.reference_changed = rank.reference is not None and description["reference"]
    state = _sharded_state(rank, loading=True)
    try:
        loaded = dist_checkpointing.load(state, str(folder / "megatron"))
    except Exception as error:
        words = str(error).strip().splitlines() or ["no message"]
        raise CheckpointError(f"{folder} cannot be read: {type(error).__name__}: {words[-1]}") from error
    for number, chunk in enumerate(rank.trained.model.chunks):
        chunk.load_state_dict(loaded[f"model{number}"])
        if rank.reference is not None and rank.reference_changed:
            rank.reference.model.chunks[number].load_state_dict(loaded[f"reference{number}"])
    rank.training.load(loaded["optimizer"])
    rank.step = int(description["step"])
    restore_rank(folder / "random" / f"rank_{dist.get_rank():05d}.pt", rank.device)


def _sharded_state(rank: SavedRank, *, loading: bool) -> dict[str, Any]:
    """Return the state in Megatron-Core's sharded form."""
    chunks = rank.trained.model.chunks
    state = {f"model{number}": chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}
    optimizer = rank.training.optimizer.sharded_state_dict(state, is_loading=loading, metadata=SHARDING)
    if rank.reference is not None and rank.reference_changed:
        for number, chunk in enumerate(rank.reference.model.chunks):
            state[f"reference{number}"] = chunk.sharded_state_dict(prefix="reference.")
    return state | {"optimizer": optimizer}


def _move_to_cpu(shard: Any, cpu_copy: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(shard, ShardedTensor | ShardedTensorFactory) and isinstance(shard.data, torch.Tensor):
        shard.data = cpu_copy(shard.data)
    return shard


def _empty(spec: TensorSpec) -> tuple[str, torch.Tensor]:
    return spec.name, torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))


def _copy_config(rank: SavedRank, folder: Path) -> None:
    config = json.loads((rank.model_folder / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    config["dtype"] = str(rank.trained.model.config.params_dtype).removeprefix("torch.")
    if rank.trained.model.values:
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}  # one number a token
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _description(rank: SavedRank) -> dict[str, Any]:
    return {
        "step": rank.step,
        "ranks": dist.get_world_size(),
        "shapes": {spec.name: list(spec.shape) for spec in rank.trained.weights.specs()},
        "frozen": sorted(rank.config.freeze),
        "reference": rank.reference_changed,
    }


def _read_description(folder: Path) -> dict[str, Any]:
    with reading(folder / "learner.json", "description of a whole checkpoint", CheckpointError):
        description: dict[str, Any] = json.loads((folder / "learner.json").read_bytes())
        return {
            "step": int(description["step"]),
            "shapes": dict(description["shapes"]),
            "frozen": list(description["frozen"]),
            "reference": bool(description["reference"]),
        }


def _items(described: Any) -> list[tuple[str, str]]:
    return [
        (str(name), str(value))
        for name, value in (
            described.items() if isinstance(described, dict) else zip(described, described, strict=True)
        )
    ]
