"""Checkpoints of an FSDP rank.

::

    folder/
      model/         Hugging Face folder: float32 safetensors, configuration, the tokenizer's files
      optimizer/     torch.distributed.checkpoint: loads on any number of ranks; absent before the first step
      reference/     the reference policy, likewise; only once it differs from that of the start
      random/        one file per rank: torch, CUDA, NumPy and Python states
      learner.json   finished steps, optimizer, number of ranks, shapes of weights, frozen ones; written last
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.utils._pytree import tree_map_only

from agentrl.config.learner import LearnerConfig
from agentrl.core.atomic_files import partial_path, publish
from agentrl.core.errors import CheckpointError
from agentrl.core.file_modes import give_default_mode
from agentrl.core.reading import reading
from agentrl.learner.base import WeightSource
from agentrl.learner.fsdp.model import PackedModel
from agentrl.learner.random_states import random_states, restore_random

COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
"""Files of a model folder other than weights: configuration, tokenizer and chat template."""
NOT_COPIED = ("model.safetensors.index.json", "config.json")


class SavedRank(WeightSource, Protocol):
    """The state of a rank that is saved and loaded."""

    config: LearnerConfig
    device: torch.device
    source: Path
    """The model folder that the rank was loaded from; its tokenizer files are copied."""
    model: PackedModel
    optimizers: list[torch.optim.Optimizer]
    step: int
    """Finished optimizer steps."""
    models: dict[str, PackedModel]
    """The policy as ``main``, and the reference, if there is one; or the critic."""
    reference_updated: bool
    """Whether the reference was the policy of an earlier step (``algo.reference_steps``)."""

    def whole(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a weight, cast to ``dtype``, where `gather` would write it. Collective."""
        ...

    def present(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the state in readable memory: the offloaded copy while the rank sleeps."""
        ...


def save_state(rank: SavedRank, folder: Path) -> None:
    """Write ``folder`` atomically, as a partial folder that is renamed once complete. Collective."""
    part = partial_path(folder)
    if dist.get_rank() == 0:
        shutil.rmtree(part, ignore_errors=True)
        (part / "random").mkdir(parents=True)
        (part / "model").mkdir()
    dist.barrier()
    tensors = _whole_weights(rank)
    if dist.get_rank() == 0:
        _write_model(rank, tensors, part / "model")
    torch.save(_random_states(rank.device), part / "random" / f"rank_{dist.get_rank():05d}.pt")
    if rank.step:
        states = tree_map_only(torch.Tensor, rank.present, _optimizer_states(rank))
        save_sharded(states, checkpoint_id=part / "optimizer")
    if rank.reference_updated:
        save_sharded(tree_map_only(torch.Tensor, rank.present, _reference(rank)), checkpoint_id=part / "reference")
    dist.barrier()
    if dist.get_rank() == 0:
        (part / "learner.json").write_text(json.dumps(_description(rank), indent=1), encoding="utf-8")
        publish(part, folder)
    dist.barrier()


def load_state(rank: SavedRank, folder: Path) -> None:
    """Load weights, optimizer and random states. Collective.

    Raises:
        CheckpointError: see `LearnerRank.load`.

    """
    found = _read_description(folder)
    expected = _description(rank)
    for key in ("optimizer", "shapes", "frozen"):
        if found[key] != expected[key]:
            raise CheckpointError(
                f"{folder} was written with another {key}: {_difference(rank, found[key], expected[key])}"
            )
    try:
        weights = load_file(folder / "model" / "model.safetensors")
        full = StateDictOptions(full_state_dict=True, strict=False)
        set_model_state_dict(rank.model, {f"hf.{name}": value for name, value in weights.items()}, options=full)
        states = _load_optimizers(rank, folder / "optimizer") if found["step"] else {}
        rank.reference_updated = (folder / "reference").is_dir() and "reference" in rank.models
        if rank.reference_updated:
            load_sharded(_reference(rank), checkpoint_id=folder / "reference")
    except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception
        words = str(error).strip().splitlines() or ["no message"]
        raise CheckpointError(f"{folder} cannot be read: {type(error).__name__}: {words[-1]}") from error
    for index, optimizer in enumerate(rank.optimizers):
        if states:
            _set_moments(rank, optimizer, states[str(index)])
        else:
            optimizer.state.clear()
    rank.step = int(found["step"])
    _restore_random(folder / "random" / f"rank_{dist.get_rank():05d}.pt", rank.device)


def _whole_weights(rank: SavedRank) -> dict[str, torch.Tensor]:
    """Return all weights on the CPU of rank 0, and nothing on other ranks."""
    found = {}
    for spec in rank.specs():
        tensor = rank.whole(spec.name, getattr(torch, spec.dtype))
        if dist.get_rank() == 0:
            found[spec.name] = tensor.cpu().contiguous()
    return found


def _write_model(rank: SavedRank, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    for pattern in COPIED:
        for file in rank.source.glob(pattern):
            if file.name not in NOT_COPIED:
                shutil.copyfile(file, folder / file.name)
    model: Any = rank.model.hf
    model.config.dtype = torch.float32
    model.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    give_default_mode(folder / "model.safetensors")


def _optimizer_states(rank: SavedRank) -> dict[str, Any]:
    """Return each optimizer's state by parameter name, sharded; created here if no step has been taken yet."""
    return {str(i): get_optimizer_state_dict(rank.model, optimizer) for i, optimizer in enumerate(rank.optimizers)}


def _load_optimizers(rank: SavedRank, folder: Path) -> dict[str, Any]:
    states = _optimizer_states(rank)
    load_sharded(states, checkpoint_id=folder)
    return states


def _reference(rank: SavedRank) -> dict[str, torch.Tensor]:
    """Return the sharded weights of the reference policy by name; loading writes into them."""
    return {name: parameter.detach() for name, parameter in rank.models["reference"].hf.named_parameters()}


def _set_moments(rank: SavedRank, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's moments. Weight decay, betas and the like stay as configured; every step sets the learning rate."""
    kept = ("params", "lr")
    configured = [{key: value for key, value in group.items() if key not in kept} for group in optimizer.param_groups]
    set_optimizer_state_dict(rank.model, optimizer, state)
    for group, options in zip(optimizer.param_groups, configured, strict=True):
        group.update(options)


def _description(rank: SavedRank) -> dict[str, Any]:
    return {
        "step": rank.step,
        "optimizer": rank.config.optimizer.name,
        "ranks": dist.get_world_size(),
        "shapes": {name: list(parameter.shape) for name, parameter in rank.model.hf.named_parameters()},
        "frozen": sorted(name for name, parameter in rank.model.hf.named_parameters() if not parameter.requires_grad),
    }


def _read_description(folder: Path) -> dict[str, Any]:
    with reading(folder / "learner.json", "description of a whole checkpoint", CheckpointError):
        found: dict[str, Any] = json.loads((folder / "learner.json").read_bytes())
        shapes, frozen = dict(found["shapes"]), list(found["frozen"])
        return {"step": int(found["step"]), "optimizer": str(found["optimizer"]), "shapes": shapes, "frozen": frozen}


def _difference(rank: SavedRank, found: Any, expected: Any) -> str:
    is_critic = "critic" in rank.models
    if isinstance(found, list):
        other = min({*found} ^ {*expected})
        now, before = ("trained", "frozen") if other in found else ("frozen", "trained")
        return f"{other} is {before}, in this run {now} (learner.freeze)"
    if not isinstance(found, dict):
        key = "algo.critic.optimizer.name" if is_critic else "learner.optimizer.name"
        return f"{found!r}, this run has {expected!r} ({key})"
    path = "algo.critic.path" if is_critic else "model.path"
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            return f"{name} is {found.get(name)}, in this run's model {expected.get(name)} ({path})"
    return "the order of weights"


def _random_states(device: torch.device) -> dict[str, Any]:
    return random_states() | {"cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None}


def _restore_random(file: Path, device: torch.device) -> None:
    """Restore this rank's states; a rank that the saved run did not have keeps the state of its seed."""
    if not file.is_file():
        return
    with reading(file, "file of random states", CheckpointError):
        states = torch.load(file, weights_only=True)
        restore_random(states)
        if device.type == "cuda" and states["cuda"] is not None:
            torch.cuda.set_rng_state(states["cuda"], device)
