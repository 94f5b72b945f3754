"""FSDP2 sharding of a model of the learner, and expert parallelism.

With ``learner.expert_parallel`` the ranks of a copy of the weights are rows of so many adjacent ranks. The ranks of a row have
different experts, those of a column the same ones, which are sharded over the column.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from agentrl.config.learner import LearnerConfig
from agentrl.learner.fsdp.experts import divide_experts, expert_modules
from agentrl.learner.fsdp.model import PackedModel
from agentrl.learner.layers import decoder_layers, vision_blocks

_REPLICA, _SHARD, _COLUMN, _EXPERT = "replica", "shard", "column", "expert"


@dataclass(frozen=True, slots=True)
class RankMesh:
    """The ranks of the learner."""

    shards: DeviceMesh
    """Mesh of all weights but those of divided experts: ``shard``, or ``replica`` and ``shard`` with several copies."""
    experts: DeviceMesh | None
    """Mesh of divided experts: ``shard`` is the dimensions ``column`` and ``expert``."""

    def holding(self, tensor: DTensor) -> DeviceMesh:
        """Return the mesh of a tensor that is sharded as one of another type of device."""
        if not _is_divided(tensor):
            return self.shards
        assert self.experts is not None
        return self.experts


def make_mesh(device_type: str, config: LearnerConfig) -> RankMesh | None:
    """Return the mesh of all ranks, or None for one rank. Collective."""
    ranks, replicas, experts = dist.get_world_size(), config.replicas, config.expert_parallel
    if ranks == 1:
        return None
    if replicas == 1:
        shards = init_device_mesh(device_type, (ranks,), mesh_dim_names=(_SHARD,))
    else:
        shards = init_device_mesh(device_type, (replicas, ranks // replicas), mesh_dim_names=(_REPLICA, _SHARD))
    expert_mesh: DeviceMesh | None = None
    if experts > 1:
        sizes = (ranks // replicas // experts, experts)
        expert_mesh = shards._unflatten(shards.ndim - 1, sizes, (_COLUMN, _EXPERT))
    for mesh in filter(None, (shards, expert_mesh)):
        for group in mesh.get_all_groups():  # torch's own limit is ten minutes with NCCL
            _set_pg_timeout(timedelta(seconds=config.step_timeout_s), group)
    return RankMesh(shards, expert_mesh)


def shard_mesh(weight: DTensor) -> DeviceMesh:
    """Return the mesh of the ranks that hold this rank's copy of a weight together."""
    mesh: DeviceMesh = weight.device_mesh._get_root_mesh()
    return mesh if mesh.ndim == 1 else mesh[_SHARD]


def rank_rows(weight: DTensor) -> list[slice]:
    """Return the rows of a weight, its first dimension, of each rank of `shard_mesh`.

    FSDP gives every rank the same number of rows, the last ones fewer or none: of all, or of those of the rank's experts.
    """
    experts = weight.device_mesh[_EXPERT].size() if _is_divided(weight) else 1
    columns, rows = shard_mesh(weight).size() // experts, len(weight) // experts
    starts = range(0, experts * rows, rows) if experts > 1 else range(1)
    size = -(-rows // columns)
    return [
        slice(start + min(column * size, rows), start + min((column + 1) * size, rows))
        for column in range(columns)
        for start in starts
    ]


def is_replica(tensor: torch.Tensor) -> bool:
    """Return whether another rank, of the first copy, has the same shard."""
    if not isinstance(tensor, DTensor):
        return False
    mesh = tensor.device_mesh
    return _REPLICA in (mesh.mesh_dim_names or ()) and mesh.get_local_rank(_REPLICA) > 0


def _is_divided(tensor: DTensor) -> bool:
    """Return whether a tensor is of experts that ranks have different ones of."""
    return _EXPERT in (tensor.device_mesh.mesh_dim_names or ())


def shard(model: PackedModel, mesh: RankMesh, config: LearnerConfig) -> None:
    """Shard the parameters over ``mesh``: a unit per decoder layer and vision block, one for divided experts, one for the rest.

    Gradients are summed over ranks.

    Raises:
        ConfigError: see `divide_experts`.
    """
    precision = MixedPrecisionPolicy()
    if model.autocast and mesh.shards.device_type == "cuda":
        # Weights are gathered in bfloat16; gradients are reduced, and accumulated, in float32.
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    if mesh.experts is not None:
        divide_experts(model.hf, mesh.experts[_EXPERT])
        copies = mesh.experts[tuple(name for name in mesh.experts.mesh_dim_names or () if name != _EXPERT)]
        for experts in expert_modules(model.hf):
            fully_shard(experts, mesh=copies, mp_policy=precision, reshard_after_forward=config.reshard_after_forward)
    for layer in (*vision_blocks(model.hf), *decoder_layers(model.hf)):
        fully_shard(layer, mesh=mesh.shards, mp_policy=precision, reshard_after_forward=config.reshard_after_forward)
    fully_shard(model, mesh=mesh.shards, mp_policy=precision, reshard_after_forward=False)
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


def clip_gradients(weights: list[nn.Parameter], maximum: float) -> float:
    """Scale the gradients of all ranks down to a norm of at most ``maximum``; return the norm before. Collective."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    by_mesh: dict[bool, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_mesh[isinstance(gradient, DTensor) and _is_divided(gradient)].append(gradient)
    if not by_mesh[True]:
        norm = torch.nn.utils.clip_grad_norm_(weights, maximum)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    # Norms of gradients on different meshes cannot be added up.
    norms = [torch.nn.utils.get_total_norm(group) for group in by_mesh.values() if group]
    norm = torch.linalg.vector_norm(torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]))
    scale = (maximum / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in gradients], scale)
    return float(norm)
