"""Checkpoints of an FSDP rank.

::

    folder/
      model/         Hugging Face folder: float32 safetensors, configuration, the tokenizer's files
      weights/       float32 weights, torch.distributed.checkpoint; model/ has none then, see `BackendRank.saves_hf`
      draft_layers/  then, weights of multi-token prediction in the folder that the rank was loaded from
      optimizer/     torch.distributed.checkpoint; absent before the first step
      adapters/      LoRA adapters, likewise; model/ then has merged weights, of policies with names those of the base model,
                     and without weights in model/ there is no weights/ either
      reference/     the reference policy, likewise; only once it differs from that of the start
      random/        one file per rank: torch, CUDA, NumPy and Python states
      policies/      with LoRA, a PEFT folder for each policy: adapter_model.safetensors, adapter_config.json
  learner.json   finished steps by policy, optimizer, number of ranks, LoRA's rank and alpha, folder of its base model, shapes of
                 weights, frozen ones

Every rank writes and reads its shards alone. A checkpoint loads on any number of ranks.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from agentrl.config.learner import LearnerConfig
from agentrl.core.atomic_files import names_file
from agentrl.core.background import run_in_daemon_thread
from agentrl.core.errors import CheckpointError, OtherKeysError
from agentrl.core.reading import reading
from agentrl.distributed.base import TensorSpec, tensor_spec
from agentrl.learner.fsdp.gather import MergedWeights
from agentrl.learner.fsdp.model import PackedModel
from agentrl.learner.fsdp.reference import Reference
from agentrl.learner.fsdp.sharding import is_replica
from agentrl.learner.fsdp.weights import LORA_KEY, fill, is_adapted, local, named_tensors, shard_slices
from agentrl.learner.optimizer_states import OptimizerStates
from agentrl.learner.random_states import rank_states, restore_rank, save_rank_states
from agentrl.learner.sharded_files import Box, TensorBoxes, flat_boxes, load_sharded, save_sharded
from agentrl.models.export import copy_other_files
from agentrl.models.hub_tensors import HubTensor
from agentrl.models.peft_folder import ADAPTERS, write_peft_config
from agentrl.models.sharded_weights import WEIGHTS
from agentrl.models.weight_files import WeightFiles
from agentrl.models.weight_writer import DraftLayers, WeightWriter


class SavedRank(Protocol):
    """The state of a rank that is saved and loaded."""

    config: LearnerConfig
    device: torch.device
    model_folder: Path
    """The model folder that the rank was loaded from; its tokenizer files are copied."""
    model: PackedModel
    optimizers: dict[str, torch.optim.Optimizer]
    """By policy and number."""
    optimizer_states: OptimizerStates
    steps: dict[str, int]
    """Finished optimizer steps of each policy."""
    name: str
    """Name of the model: ``main`` or ``critic``."""
    reference: Reference | None
    """The frozen policy of the loss, if it needs one."""
    writers: dist.ProcessGroup
    """Process group of the threads that write checkpoints."""

    merged: MergedWeights
    """The weights of `model`, with LoRA adapters merged."""

    @property
    def saves_hf(self) -> bool:
        """Whether checkpoints have a Hugging Face folder of the weights."""

    def cpu_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the state on the CPU, in a copy that optimizer steps do not change."""


def saved_tensors(rank: SavedRank) -> Iterator[torch.Tensor]:
    """Yield the tensors of a checkpoint."""
    if rank.saves_hf or not rank.merged.adapters:
        yield from named_tensors(rank.model.hf).values()
    yield from rank.merged.adapters.values()
    for optimizer in rank.optimizers.values():
        yield from (t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor))
    yield from _reference(rank).values()


def start_saving(rank: SavedRank, folder: Path) -> Future[None]:
    """Begin to write the copies of `saved_tensors` into ``folder``; return when this rank is done, as a future. Collective."""
    weights, tensors = named_tensors(rank.model.hf), rank.merged.tensors.values()
    layers = getattr(rank.model.hf.config.get_text_config(), "num_hidden_layers", sys.maxsize)
    drafts = None if rank.name == "critic" else DraftLayers(rank.model_folder, layers, "model.path")
    writer = None
    if rank.saves_hf:
        specs = [
            TensorSpec(tensor.name, tensor_spec("", weights[tensor.weight]).dtype, tensor.shape) for tensor in tensors
        ]
        writer = WeightWriter(folder / "model", [*specs, *(drafts.specs if drafts else ())])
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        with names_file(folder):
            (folder / "random").mkdir(parents=True)
            (folder / "model").mkdir()
            _copy_files(rank, folder / "model")
            if writer is not None:
                writer.create()
            (folder / "learner.json").write_text(json.dumps(_description(rank), indent=1), encoding="utf-8")
    sharded = _sharded_state(rank)
    staged: dict[str, torch.Tensor] = {}
    if writer is not None or not rank.merged.adapters:
        merged = {name: rank.merged.get(name, rank.cpu_copy) for name in rank.merged.base}
        staged = {name: rank.cpu_copy(tensor) for name, tensor in weights.items() if name not in merged} | merged
    if writer is None and staged:
        sharded[WEIGHTS] = _weight_boxes(tensors, staged)
    adapters = _begin_policies(rank, folder / "policies")
    states = rank_states(rank.device)
    dist.barrier()

    def write() -> None:
        for name, state in sharded.items():  # first: it fails on all ranks together
            save_sharded(state, folder / name, rank.writers)
        for tensor in tensors:
            if writer is not None and _has_shard(weight := staged[tensor.weight]):
                for box in _tensor_boxes(tensor, weight):
                    writer.write_part(tensor.name, box.tensor, box.offsets)
        for adapter_writer, name, weight in adapters:
            if _has_shard(weight):
                adapter_writer.write_part(name, local(weight), [indices.start for indices in shard_slices(weight)])
        if drafts is not None and dist.get_rank() == 0:
            if writer is not None:
                drafts.write(writer)
            elif staged:
                drafts.save(folder)
        save_rank_states(states, folder / "random")

    return run_in_daemon_thread(write, "checkpoint")


def _sharded_state(rank: SavedRank) -> dict[str, Any]:
    """Return copies of optimizer states, a reference that has changed, and adapters, by folder."""
    stepped = [name for name, optimizer in rank.optimizers.items() if optimizer.state]
    sharded: dict[str, Any] = {"optimizer": _optimizer_states(rank, stepped)} if stepped else {}
    if reference := _reference(rank):
        sharded["reference"] = reference
    if rank.merged.adapters:
        sharded["adapters"] = dict(rank.merged.adapters)
    copies: dict[str, Any] = tree_map_only(torch.Tensor, rank.cpu_copy, sharded)
    return copies


def _has_shard(weight: torch.Tensor) -> bool:
    """Return whether this rank writes a part of a weight."""
    if not isinstance(weight, DTensor):
        return dist.get_rank() == 0
    return weight.to_local().numel() > 0 and not is_replica(weight)


def _begin_policies(rank: SavedRank, folder: Path) -> list[tuple[WeightWriter, str, torch.Tensor]]:
    """Begin a PEFT folder for each policy, and return the copies of all adapters to write; none without LoRA."""
    staged: list[tuple[WeightWriter, str, torch.Tensor]] = []
    for policy, names in rank.merged.exported.items():
        assert rank.config.lora is not None, "it has adapters"
        adapters = {name: rank.merged.adapters[inner] for name, inner in names.items()}
        specs = [tensor_spec(*adapter) for adapter in adapters.items()]
        writer = WeightWriter(folder / policy, specs, single=ADAPTERS)
        if dist.get_rank() == 0:
            (folder / policy).mkdir(parents=True)
            writer.create()
            write_peft_config(folder / policy, rank.config.lora, [*adapters])
        staged += [(writer, name, rank.cpu_copy(weight)) for name, weight in adapters.items()]
    return staged


def _tensor_boxes(tensor: HubTensor, weight: torch.Tensor) -> list[Box]:
    """Return the boxes of a Hugging Face tensor that this rank's shard of ``weight`` has, in the same memory."""
    slices, shard = shard_slices(weight), local(weight)
    if not shard.numel():
        return []
    if tensor.is_whole:
        return [Box(tuple(indices.start for indices in slices), shard)]
    lines = shard.flatten(0, -2)
    shard_lines, tensor_lines = tensor.overlap(slices[0].start * (len(lines) // len(shard)), len(lines))
    return [*flat_boxes(tensor.shape, tensor_lines.start * tensor.shape[-1], lines[shard_lines].view(-1))]


def _weight_boxes(tensors: Iterable[HubTensor], weights: Mapping[str, torch.Tensor]) -> dict[str, TensorBoxes]:
    """Return what this rank has of Hugging Face tensors that are made of ``weights``, in the same memory."""
    boxes = {tensor: _tensor_boxes(tensor, weights[tensor.weight]) for tensor in tensors}
    return {tensor.name: TensorBoxes(tensor.shape, parts) for tensor, parts in boxes.items() if parts}


def load_state(rank: SavedRank, folder: Path) -> None:
    """Load weights, optimizer and random states, each rank its shards. Collective.

    Raises:
        CheckpointError: see `LearnerRank.load`.
    """
    saved = _read_description(folder)
    expected = _description(rank)
    for key in ("optimizer", "moments", "lora", "shapes", "frozen"):
        if saved[key] != expected[key]:
            difference = _difference(rank, key, saved[key], expected[key])
            raise OtherKeysError(
                f"{folder} was written with another {key}: {difference}; take the change back, or start another run"
            )
    try:
        model, key = folder / "model", "checkpoint"
        if rank.merged.adapters:  # model/ has merged weights; the rank has those of the base model
            load_sharded(rank.merged.adapters, folder / "adapters")
        elif (folder / WEIGHTS).is_dir():
            load_sharded(_weight_boxes(rank.merged.tensors.values(), named_tensors(rank.model.hf)), folder / WEIGHTS)
        else:
            fill(rank.model.hf, model, WeightFiles(model, key), values=rank.name == "critic", key=key)
        states = _load_optimizers(rank, folder / "optimizer", saved["optimizers"]) if saved["optimizers"] else {}
        if rank.reference is not None and (folder / "reference").is_dir():
            rank.reference.load(folder / "reference")
    except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception
        words = str(error).strip().splitlines() or ["no message"]
        raise CheckpointError(f"{folder} cannot be read: {type(error).__name__}: {words[-1]}") from error
    if not states:
        rank.optimizer_states.clear()
    for name, optimizer in rank.optimizers.items():
        if name in states:
            _set_moments(rank, optimizer, states[name])
        else:
            optimizer.state.clear()
    rank.steps = saved["steps"]
    restore_rank(folder / "random" / f"rank_{dist.get_rank():05d}.pt", rank.device)


def _copy_files(rank: SavedRank, folder: Path) -> None:
    """Write the files of a Hugging Face folder other than weights: configuration, tokenizer, chat template."""
    copy_other_files(rank.model_folder, folder)
    model: Any = rank.model.hf
    model.config.dtype = torch.float32
    model.config.save_pretrained(folder)


def _optimizer_states(rank: SavedRank, names: Sequence[str]) -> dict[str, Any]:
    """Return states of optimizers by parameter name, sharded; created here if no step has been taken yet."""
    return {name: get_optimizer_state_dict(rank.model, rank.optimizers[name]) for name in names}


def _load_optimizers(rank: SavedRank, folder: Path, names: Sequence[str]) -> dict[str, Any]:
    optimizer_states = rank.optimizer_states
    if optimizer_states.offloaded:
        optimizer_states.create([rank.optimizers[name] for name in names])
    states: dict[str, Any] = tree_map_only(
        torch.Tensor, lambda t: rank.cpu_copy(t) if optimizer_states.holds(t) else t, _optimizer_states(rank, names)
    )
    load_sharded(states, folder)
    return states


def _reference(rank: SavedRank) -> dict[str, torch.Tensor]:
    """Return the sharded weights of a reference that was the policy of an earlier step, by name."""
    return rank.reference.weights() if rank.reference is not None and rank.reference.was_updated else {}


def _set_moments(rank: SavedRank, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's moments. Weight decay, betas and the like stay as configured; every step sets the learning rate."""
    if rank.optimizer_states.offloaded:  # what is in CPU memory was loaded in place
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            group["lr"] = saved["lr"]
        return
    loaded_keys = ("params", "lr")
    configured = [
        {key: value for key, value in group.items() if key not in loaded_keys} for group in optimizer.param_groups
    ]
    set_optimizer_state_dict(rank.model, optimizer, state)
    for group, options in zip(optimizer.param_groups, configured, strict=True):
        group.update(options)


def _description(rank: SavedRank) -> dict[str, Any]:
    lora = rank.config.lora
    return {
        "steps": rank.steps,
        "optimizers": [name for name, optimizer in rank.optimizers.items() if optimizer.state],
        "optimizer": rank.config.optimizer.name,
        "moments": _moments(rank),
        "ranks": dist.get_world_size(),
        "lora": None if lora is None else {"rank": lora.rank, "alpha": lora.alpha},
        "base": None if lora is None else str(rank.model_folder.absolute()),
        "shapes": {name: list(parameter.shape) for name, parameter in rank.model.hf.named_parameters()},
        "frozen": sorted(name for name, parameter in rank.model.hf.named_parameters() if not parameter.requires_grad),
    }


def _moments(rank: SavedRank) -> str:
    return "8bit" if rank.config.optimizer.state == "8bit" else "float32"


def _read_description(folder: Path) -> dict[str, Any]:
    with reading(folder / "learner.json", "description of a whole checkpoint", CheckpointError):
        description: dict[str, Any] = json.loads((folder / "learner.json").read_bytes())
        if "step" in description:
            raise OtherKeysError(
                f"{folder} was written with learner.backend=megatron, this run has fsdp; take the change back, or start another "
                "run"
            )
        shapes, frozen = dict(description["shapes"]), list(description["frozen"])
        lora = (
            None
            if description.get("lora") is None
            else {key: int(description["lora"][key]) for key in ("rank", "alpha")}
        )
        return {
            "steps": {str(name): int(steps) for name, steps in description["steps"].items()},
            "optimizers": [str(name) for name in description["optimizers"]],
            "optimizer": str(description["optimizer"]),
            "moments": str(description["moments"]),
            "lora": lora,
            "shapes": shapes,
            "frozen": frozen,
        }


def _difference(rank: SavedRank, key: str, saved: Any, expected: Any) -> str:
    is_critic = rank.name == "critic"
    if key in ("optimizer", "moments"):
        section = "algo.critic.optimizer" if is_critic else "learner.optimizer"
        return f"{saved!r}, this run has {expected!r} ({section}.{'name' if key == 'optimizer' else 'state'})"
    if key == "lora":
        shown = [
            None if options is None else ", ".join(f"{name} {options[name]}" for name in options)
            for options in (saved, expected)
        ]
        return f"{shown[0]}, this run has {shown[1]} ({LORA_KEY})"
    if key == "frozen":
        weight = min({*saved} ^ {*expected})
        current, previous = ("trained", "frozen") if weight in saved else ("frozen", "trained")
        return f"{weight} is {previous}, in this run {current} (learner.freeze)"
    path = "algo.critic.path" if is_critic else "model.path"
    for name in sorted(saved.keys() | expected.keys()):
        if saved.get(name) != expected.get(name):
            path = f"{LORA_KEY}.target" if is_adapted(name) else path
            return f"{name} is {saved.get(name)}, in this run's model {expected.get(name)} ({path})"
    return "the order of weights"
