"""FSDP2 sharding of a model of the learner."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from agentrl.config.learner import LearnerConfig
from agentrl.learner.fsdp.model import PackedModel
from agentrl.learner.layers import decoder_layers

_REPLICA, _SHARD = "replica", "shard"


def make_mesh(device_type: str, config: LearnerConfig) -> DeviceMesh | None:
    """Return the mesh of all ranks, with several ``replicas`` of two dimensions, or None for one rank. Collective."""
    ranks, replicas = dist.get_world_size(), config.replicas
    if ranks == 1:
        return None
    if replicas == 1:
        return init_device_mesh(device_type, (ranks,))
    return init_device_mesh(device_type, (replicas, ranks // replicas), mesh_dim_names=(_REPLICA, _SHARD))


def shard_mesh(weight: DTensor) -> DeviceMesh:
    """Return the mesh of the ranks that hold this rank's copy of a weight together."""
    mesh = weight.device_mesh
    return mesh if mesh.ndim == 1 else mesh[_SHARD]


def is_replica(tensor: torch.Tensor) -> bool:
    """Return whether another rank, of the first copy, has the same shard."""
    return (
        isinstance(tensor, DTensor) and tensor.device_mesh.ndim > 1 and tensor.device_mesh.get_local_rank(_REPLICA) > 0
    )


def shard(model: PackedModel, mesh: DeviceMesh, config: LearnerConfig) -> None:
    """Shard the parameters over ``mesh``: one unit per decoder layer, and one for the rest.

    Gradients are summed over ranks.
    """
    precision = MixedPrecisionPolicy()
    if model.autocast and mesh.device_type == "cuda":
        # Weights are gathered in bfloat16; gradients are reduced, and accumulated, in float32.
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for layer in decoder_layers(model.hf):
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=config.reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is a plain sum with the denominator in the weights: averaging over ranks would scale it down.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo lacks the scaled sum that is used otherwise


def reshard(model: PackedModel) -> None:
    """Free gathered weights, which stay in place of the shards after a forward pass without a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
