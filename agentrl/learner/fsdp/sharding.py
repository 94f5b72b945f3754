"""FSDP2 sharding of a model of the learner."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from agentrl.config.learner import LearnerConfig
from agentrl.learner.fsdp.model import PackedModel
from agentrl.learner.layers import decoder_layers


def shard(model: PackedModel, mesh: DeviceMesh, config: LearnerConfig) -> None:
    """Shard the parameters over ``mesh``: one unit per decoder layer, and one for the rest. Gradients are summed over ranks."""
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
