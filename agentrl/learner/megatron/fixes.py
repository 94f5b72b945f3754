"""Fixes of Megatron-Core 0.16.1 without Transformer Engine and Apex.

One is for speed: in Megatron-Core the host waits for the norm of each gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads, distrib_optimizer
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils

SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}
"""``metadata`` of the distributed optimizer's state: the default cannot be loaded, ``dp_reshardable`` resumes wrong."""
_FIXED = "fixed_by_agentrl"


def apply_fixes() -> None:
    """Apply the fixes; repeated calls change nothing."""
    # Routing with a dtype compares this function of Transformer Engine with None, but imports it only if that is installed.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # Latent attention takes the placeholders of Transformer Engine's classes for classes.
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl = _norm, _scale
    optimizer = distrib_optimizer.DistributedOptimizer
    if not distrib_optimizer.HAVE_APEX_OR_TE and not hasattr(optimizer, _FIXED):
        for name, make in _OPTIMIZER_WRAPPERS.items():
            setattr(optimizer, name, make(getattr(optimizer, name)))
        setattr(optimizer, _FIXED, True)


def _norm(size: int, flag: object, lists: Sequence[list[torch.Tensor]], per_tensor: bool) -> tuple[torch.Tensor, None]:
    """Return the norm ``[1]`` of the tensors in a list."""
    [tensors] = lists
    return torch.stack(torch._foreach_norm(tensors)).norm()[None], None


def _scale(size: int, flag: object, lists: Sequence[list[torch.Tensor]], factor: float) -> None:
    """Multiply tensors in place; ``lists`` has them twice, as inputs and as outputs."""
    inputs, outputs = lists
    assert all(source is target for source, target in zip(inputs, outputs, strict=True))
    torch._foreach_mul_(outputs, factor)


def _fill_state_before_load(sharded_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    """Before a load, give a new optimizer the state that AdamW would: Megatron-Core asserts that there is a ``step``."""

    @wraps(sharded_state_dict)
    def call(self: Any, model: Any = None, is_loading: bool = False, **options: Any) -> Any:
        if is_loading and not self.optimizer.state:
            for group in self.optimizer.param_groups:
                for shard in group["params"]:
                    self.optimizer.state[shard] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(shard, requires_grad=False),
                        "exp_avg_sq": torch.zeros_like(shard, requires_grad=False),
                    }
        return sharded_state_dict(self, model or {}, is_loading, **options)

    return call


def _keep_step(set_states: Callable[..., None]) -> Callable[..., None]:
    """Keep the ``step`` of a shard's state, which the loaded state does not have and Megatron-Core looks up there."""

    @wraps(set_states)
    def call(self: Any, model_param: Any, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        set_states(self, model_param, {"step": state["step"], **tensors} if "step" in state else tensors)

    return call


def _clone_steps(load_state_dict: Callable[..., None]) -> Callable[..., None]:
    """Load without gradients, as float32 shards are views of parameters, and give each shard its ``step``.

    Megatron-Core gives all of them one tensor, which AdamW would increase once for each.
    """

    @wraps(load_state_dict)
    def call(self: Any, state_dict: Any) -> None:
        with torch.no_grad():
            load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    return call


_OPTIMIZER_WRAPPERS = {
    "sharded_state_dict": _fill_state_before_load,
    "_set_main_param_and_optimizer_states": _keep_step,
    "load_state_dict": _clone_steps,
}
