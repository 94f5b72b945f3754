"""FSDP2 sharding of a model of the learner."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from agentrl.config.learner import LearnerConfig
from agentrl.learner.fsdp.model import PackedModel


def shard(model: PackedModel, mesh: DeviceMesh, config: LearnerConfig) -> FSDPModule:
    """Shard the parameters over ``mesh``: one unit per decoder layer, and one for the rest. Gradients are summed over ranks.

    Returns:
        ``model`` itself, with the FSDP methods that ``fully_shard`` adds.

    """
    blocks = set(getattr(model.hf, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in blocks]
    assert layers, f"{type(model.hf).__name__} names no decoder layer in _no_split_modules"
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=config.reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is a plain sum with the denominator in the weights: averaging over ranks would scale it down.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo lacks the scaled sum that is used otherwise
    assert isinstance(model, FSDPModule)
    return model
