"""Mixtures of experts: what families with them have in common."""

from __future__ import annotations

from typing import Any

from agentrl.core.errors import ModelError
from agentrl.learner.megatron.families.base import Options, Weight, at_layer, mlp, same


def expert(hf: Any, layer: int, number: int) -> list[Weight]:
    """Return the weights of an expert."""
    return mlp(hf, layer, hf.moe_intermediate_size, f"mlp.experts.{number}", "")


def router(hf: Any, layer: int, experts: int) -> list[Weight]:
    """Return the weight of a router."""
    return [same("mlp.router.weight", at_layer(layer)("mlp.gate.weight", experts, hf.hidden_size))]


def sigmoid_options(hf: Any) -> Options:
    """Return the options of a router with sigmoids and a bias of each expert, and of shared experts.

    The first layers have a plain MLP.

    Raises:
        ModelError: the configuration has a router that Megatron-Core lacks.
    """
    if not hf.norm_topk_prob:
        raise ModelError("norm_topk_prob=false in config.json: the megatron learner always normalises sigmoid routing")
    groups = {}
    if hf.n_group > 1:
        if hf.num_experts_per_tok // hf.topk_group != 2:
            raise ModelError(
                f"num_experts_per_tok={hf.num_experts_per_tok} with topk_group={hf.topk_group} in config.json: Megatron-Core "
                "chooses groups by as many experts as there are to a chosen group, transformers always by 2"
            )
        groups = {"moe_router_num_groups": hf.n_group, "moe_router_group_topk": hf.topk_group}
    dense = min(hf.first_k_dense_replace, hf.num_hidden_layers)
    return groups | {
        "num_moe_experts": hf.n_routed_experts,
        "moe_layer_freq": [0] * dense + [1] * (hf.num_hidden_layers - dense),
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": _shared_size(hf) or None,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
    }


def sigmoid_layer(hf: Any, layer: int) -> list[Weight]:
    """Return the weights of a layer's router and shared experts, or of its plain MLP."""
    if layer < hf.first_k_dense_replace:
        return mlp(hf, layer, hf.intermediate_size)
    bias = at_layer(layer)("mlp.gate.e_score_correction_bias", hf.n_routed_experts)
    weights = [*router(hf, layer, hf.n_routed_experts), same("mlp.router.expert_bias", bias, dtype="float32")]
    if size := _shared_size(hf):
        weights += mlp(hf, layer, size, "mlp.shared_experts", "mlp.shared_experts.")
    return weights


def _shared_size(hf: Any) -> int:
    return int(hf.n_shared_experts or 0) * int(hf.moe_intermediate_size)
