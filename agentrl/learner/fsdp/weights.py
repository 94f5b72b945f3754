"""Weights of a model on `meta`: memory on the device, and contents from a Hugging Face folder, each rank its shards."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from agentrl.core.lineup import MAIN
from agentrl.learner.attention import IMPLEMENTATION
from agentrl.models.hub_tensors import HubTensor, hub_tensors
from agentrl.models.load import load_model, load_value_model, value_head_names
from agentrl.models.weight_files import WeightFiles

_log = logging.getLogger(__name__)

LORA_KEY = "learner.lora"
_BASE, _ADAPTERS = ".base_layer.", (".lora_A.", ".lora_B.")

Slices = tuple[slice, ...]
"""The slices of a full tensor that a rank has, by dimension; empty for a tensor without dimensions."""


def named_tensors(hf: nn.Module) -> dict[str, torch.Tensor]:
    """Return the saved tensors of a model by name: parameters, tied ones once, and persistent buffers."""
    persistent = hf.state_dict().keys()
    buffers = {name: buffer for name, buffer in hf.named_buffers() if name in persistent}
    parameters = {
        hf_name(name): parameter.detach() for name, parameter in hf.named_parameters() if not is_adapter(name)
    }
    return parameters | buffers


def model_hub_tensors(hf: nn.Module) -> list[HubTensor]:
    """Return the tensors of a Hugging Face folder that `named_tensors` are made of; see `hub_tensors`."""
    return hub_tensors(hf, {name: tuple(tensor.shape) for name, tensor in named_tensors(hf).items()})


def hf_name(name: str) -> str:
    """Return the name that a weight of a model with LoRA adapters has without them."""
    return name.replace(_BASE, ".")


def is_adapter(name: str) -> bool:
    """Return whether a weight is one of a LoRA adapter."""
    return any(marker in name for marker in _ADAPTERS)


def is_adapted(name: str) -> bool:
    """Return whether a weight is one of a LoRA adapter, or of a layer that has one."""
    return _BASE in name or is_adapter(name)


def peft_adapter(policy: str) -> str:
    """Return the name that a policy's adapters have in the model."""
    return "default" if policy == MAIN else policy


def adapter_name(name: str, matrix: str, policy: str) -> str:
    """Return the name of the matrix, ``A`` or ``B``, of a policy's adapter of a weight that has one."""
    return name.replace(_BASE, f".lora_{matrix}.{peft_adapter(policy)}.")


def is_policy_adapter(name: str, policy: str) -> bool:
    """Return whether a weight is one of a policy's adapters."""
    return any(f"{marker}{peft_adapter(policy)}." in name for marker in _ADAPTERS)


def peft_name(name: str, policy: str) -> str:
    """Return the name that an adapter's weight has in a PEFT folder of its policy."""
    short = name
    for marker in _ADAPTERS:
        short = short.replace(f"{marker}{peft_adapter(policy)}.", marker)
    return f"base_model.model.{short}"


def shard_slices(tensor: torch.Tensor) -> Slices:
    """Return the slices of the full tensor that this rank has."""
    shape, offset = tuple(tensor.shape), (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give the parameters on `meta` memory on ``device``, tied ones once, and move the buffers there."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in made:
                made[parameter] = nn.Parameter(_empty_like(parameter, device), parameter.requires_grad)
            setattr(module, name, made[parameter])


def _empty_like(parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    empty = torch.empty_like(local(parameter.detach()), device=device)
    if not isinstance(parameter, DTensor):
        return empty
    return DTensor.from_local(
        empty,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def untie_different(hf: Any, files: WeightFiles) -> None:
    """Give tied parameters that differ in the files a parameter each, as transformers does."""
    shapes = files.shapes()
    names = {parameter: name for name, parameter in hf.named_parameters()}
    for name, parameter in list(hf.named_parameters(remove_duplicate=False)):
        twin = names[parameter]
        if name == twin or name not in shapes or twin not in shapes:
            continue
        if not torch.equal(files.read(name, ()), files.read(twin, ())):
            _log.warning("%s and %s are tied in the model's configuration but differ in its files: untied", name, twin)
            owner, _, last = name.rpartition(".")
            setattr(hf.get_submodule(owner), last, nn.Parameter(torch.empty_like(parameter)))


@torch.no_grad()
def fill(hf: Any, folder: Path, files: WeightFiles, *, values: bool, key: str) -> None:
    """Read this rank's shards of all weights from a folder. Collective.

    The files have the model's own weights, or the tensors that they are made of; see `hub_tensors`. If names or shapes are
    others, rank 0 loads the whole model with transformers, which converts them, and the other ranks get one weight after the
    other. A value head that the files lack becomes zeros.

    Args:
        hf: a model with memory (see `allocate`).
        folder: of its weights.
        files: those of the folder.
        values: whether the model has a value head.
        key: configuration key of the folder, for messages.

    Raises:
        ModelError: weights are missing, are integers, or cannot be read.
    """
    tensors, shapes = named_tensors(hf), files.shapes()
    head = value_head_names(hf) if values else set()
    new = head if not head & shapes.keys() else set()
    converted = [
        name for name, tensor in tensors.items() if name not in new and shapes.get(name) != tuple(tensor.shape)
    ]
    components: dict[str, list[HubTensor]] = defaultdict(list)
    for hub_tensor in model_hub_tensors(hf) if converted else ():
        components[hub_tensor.weight].append(hub_tensor)
    mismatched = [
        name
        for name in converted
        if any(shapes.get(component.name) != component.shape for component in components[name])
    ]
    read = _through_transformers(folder, tensors, mismatched[0], values=values, key=key) if mismatched else files.read
    for name, tensor in tensors.items():
        shard = local(tensor)
        if name in new and not mismatched:
            shard.zero_()
        elif mismatched or (shard.numel() and name not in converted):
            if not mismatched and tensor.is_floating_point():
                files.check_floats(name)
            shard.copy_(read(name, shard_slices(tensor)))
        elif shard.numel():
            _read_components(components[name], shard_slices(tensor), shard, files)


def _read_components(components: Sequence[HubTensor], slices: Slices, shard: torch.Tensor, files: WeightFiles) -> None:
    """Read this rank's ``slices`` of a weight from the tensors that the weight is made of."""
    for tensor in components:
        files.check_floats(tensor.name)
        if tensor.is_whole:
            shard.copy_(files.read(tensor.name, slices))
            continue
        lines = shard.flatten(0, -2)
        shard_lines, tensor_lines = tensor.overlap(slices[0].start * (len(lines) // len(shard)), len(lines))
        if shard_lines.start < shard_lines.stop:
            lines[shard_lines] = files.read(tensor.name, ()).flatten(0, -2)[tensor_lines].to(lines.dtype)


def _through_transformers(
    folder: Path, tensors: dict[str, torch.Tensor], mismatched: str, *, values: bool, key: str
) -> Callable[[str, Slices], torch.Tensor]:
    """Return a function that reads slices of weights that rank 0 loads with transformers. Collective, also its calls."""
    single_rank = not dist.is_initialized() or dist.get_world_size() == 1
    full_weights: dict[str, torch.Tensor] = {}
    if single_rank or dist.get_rank() == 0:
        _log.warning(
            "%s=%s: rank 0 loads the whole model with transformers, as names or shapes of weights in its files are not those "
            "of the model (%s)",
            key,
            folder,
            mismatched,
        )
        load = load_value_model if values else load_model
        full_weights = named_tensors(load(folder, torch.float32, IMPLEMENTATION, key=key))

    def read(name: str, slices: Slices) -> torch.Tensor:
        if single_rank:
            return full_weights.pop(name)[slices]
        like = tensors[name]
        full = torch.empty(like.shape, dtype=like.dtype, device=local(like).device)
        if name in full_weights:
            full.copy_(full_weights.pop(name))
        dist.broadcast(full, 0)
        return full[slices]

    return read
