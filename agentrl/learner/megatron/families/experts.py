"""Families with mixtures of experts, and what they have in common."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from agentrl.core.errors import ModelError
from agentrl.learner.megatron.families.base import (
    Family,
    Options,
    StackedWeight,
    Weight,
    at_layer,
    attention,
    dense_options,
    gate_up,
    layer_window,
    mlp,
    norms,
    refuse,
    same,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def expert(hf: PreTrainedConfig, layer: int, number: int) -> list[Weight]:
    """Return the weights of an expert."""
    return mlp(hf, layer, hf.moe_intermediate_size, f"mlp.experts.{number}", "")


def router(hf: PreTrainedConfig, layer: int, experts: int, name: str = "mlp.gate") -> list[Weight]:
    """Return the weight of a router with this name in a Hugging Face layer."""
    return [same("mlp.router.weight", at_layer(layer)(f"{name}.weight", experts, hf.hidden_size))]


def local_options(hf: PreTrainedConfig) -> Options:
    """Return the options of a decoder whose layers all have ``num_local_experts``, weighted by a softmax over the chosen ones."""
    return dense_options(
        hf,
        num_moe_experts=hf.num_local_experts,
        moe_layer_freq=[1] * hf.num_hidden_layers,
        moe_ffn_hidden_size=hf.intermediate_size,
        moe_router_topk=hf.num_experts_per_tok,
        moe_router_pre_softmax=False,
    )


def sigmoid_options(hf: PreTrainedConfig) -> Options:
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


def sigmoid_layer(hf: PreTrainedConfig, layer: int) -> list[Weight]:
    """Return the weights of a layer's router and shared experts, or of its plain MLP."""
    if layer < hf.first_k_dense_replace:
        return mlp(hf, layer, hf.intermediate_size)
    bias = at_layer(layer)("mlp.gate.e_score_correction_bias", hf.n_routed_experts)
    weights = [*router(hf, layer, hf.n_routed_experts), same("mlp.router.expert_bias", bias, dtype="float32")]
    if size := _shared_size(hf):
        weights += mlp(hf, layer, size, "mlp.shared_experts", "mlp.shared_experts.")
    return weights


def _shared_size(hf: PreTrainedConfig) -> int:
    return int(hf.n_shared_experts or 0) * int(hf.moe_intermediate_size)


def _has_experts(hf: PreTrainedConfig, layer: int) -> bool:
    return layer not in hf.mlp_only_layers and (layer + 1) % hf.decoder_sparse_step == 0


def _qwen3_options(hf: PreTrainedConfig) -> Options:
    refuse(hf, "attention_bias", "use_sliding_window")
    return dense_options(
        hf,
        qk_layernorm=True,
        num_moe_experts=hf.num_experts,
        moe_layer_freq=[int(_has_experts(hf, layer)) for layer in range(hf.num_hidden_layers)],
        moe_ffn_hidden_size=hf.moe_intermediate_size,
        moe_router_topk=hf.num_experts_per_tok,
        # A softmax over the chosen experts is one over all, normalised.
        moe_router_pre_softmax=not hf.norm_topk_prob,
    )


def _qwen3_layer(hf: PreTrainedConfig, layer: int) -> list[Weight]:
    experts = _has_experts(hf, layer)
    last = router(hf, layer, hf.num_experts) if experts else mlp(hf, layer, hf.intermediate_size)
    return [*norms(hf, layer), *attention(hf, layer, qk_norm=True), *last]


QWEN3_MOE = Family("qwen3_moe", _qwen3_options, _qwen3_layer, expert)
"""Qwen3 with mixtures of experts, such as Qwen3-30B-A3B."""


def _glm4_options(hf: PreTrainedConfig) -> Options:
    return dense_options(hf, add_qkv_bias=hf.attention_bias, qk_layernorm=hf.use_qk_norm) | sigmoid_options(hf)


def _glm4_layer(hf: PreTrainedConfig, layer: int) -> list[Weight]:
    heads = attention(hf, layer, bias=hf.attention_bias, qk_norm=hf.use_qk_norm)
    return [*norms(hf, layer), *heads, *sigmoid_layer(hf, layer)]


GLM4_MOE = Family("glm4_moe", _glm4_options, _glm4_layer, expert)
"""GLM-4.5, 4.6 and 4.7: a sigmoid router, rotary embedding of half of each head."""


def _deepseek_options(hf: PreTrainedConfig) -> Options:
    refuse(hf, "attention_bias")
    if not hf.rope_interleave:
        raise ModelError(
            "rope_interleave=false in config.json: the megatron learner lacks it; set learner.backend=fsdp"
        )
    latent = {
        "multi_latent_attention": True,
        "q_lora_rank": hf.q_lora_rank,
        "kv_lora_rank": hf.kv_lora_rank,
        "qk_head_dim": hf.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
        "v_head_dim": hf.v_head_dim,
        "qk_layernorm": True,
        # For the scale of the softmax; transformers computes the frequencies.
        "rotary_scaling_factor": hf.rope_parameters.get("factor", 1.0),
        "mscale_all_dim": hf.rope_parameters.get("mscale_all_dim", 0.0),
    }
    return dense_options(hf) | latent | sigmoid_options(hf)


def _deepseek_layer(hf: PreTrainedConfig, layer: int) -> list[Weight]:
    return [*norms(hf, layer), *_latent_attention(hf, layer), *sigmoid_layer(hf, layer)]


def _latent_attention(hf: PreTrainedConfig, layer: int) -> list[Weight]:
    """Return the projections to and from the latents. All are divided by rows, but the output."""
    at, heads, hidden = at_layer(layer), hf.num_attention_heads, hf.hidden_size
    queries, latent = heads * (hf.qk_nope_head_dim + hf.qk_rope_head_dim), hf.kv_lora_rank
    shapes = {
        "linear_kv_down_proj": ("kv_a_proj_with_mqa", latent + hf.qk_rope_head_dim, hidden),
        "linear_kv_up_proj": ("kv_b_proj", heads * (hf.qk_nope_head_dim + hf.v_head_dim), latent),
    }
    norms = {"kv": latent}
    if hf.q_lora_rank is None:
        shapes["linear_q_proj"] = ("q_proj", queries, hidden)
    else:
        norms["q"] = hf.q_lora_rank
        shapes["linear_q_down_proj"] = ("q_a_proj", hf.q_lora_rank, hidden)
        shapes["linear_q_up_proj"] = ("q_b_proj", queries, hf.q_lora_rank)
    return [
        *(
            same(f"self_attention.{name}.weight", at(f"self_attn.{hf_name}.weight", *shape), "rows")
            for name, (hf_name, *shape) in shapes.items()
        ),
        *(
            same(f"self_attention.{name}_layernorm.weight", at(f"self_attn.{name}_a_layernorm.weight", size))
            for name, size in norms.items()
        ),
        same(
            "self_attention.linear_proj.weight", at("self_attn.o_proj.weight", hidden, heads * hf.v_head_dim), "columns"
        ),
    ]


DEEPSEEK_V3 = Family("deepseek_v3", _deepseek_options, _deepseek_layer, expert)
"""DeepSeek V3, V3.1 and R1, Kimi K2 and Moonlight: multi-head latent attention, a sigmoid router."""


def _mixtral_layer(hf: PreTrainedConfig, layer: int) -> list[Weight]:
    gate = router(hf, layer, hf.num_local_experts, "block_sparse_moe.gate")
    return [*norms(hf, layer), *attention(hf, layer), *gate]


def _mixtral_expert(hf: PreTrainedConfig, layer: int, number: int) -> list[Weight]:
    at, size, hidden = at_layer(layer), hf.intermediate_size, hf.hidden_size
    prefix = f"block_sparse_moe.experts.{number}"
    gate, up = (at(f"{prefix}.{name}.weight", size, hidden) for name in ("w1", "w3"))
    return [
        gate_up("linear_fc1.weight", gate, up),
        same("linear_fc2.weight", at(f"{prefix}.w2.weight", hidden, size), "columns"),
    ]


MIXTRAL = Family(
    "mixtral", local_options, _mixtral_layer, _mixtral_expert, window=lambda hf, layer: hf.sliding_window or None
)
"""Mixtral 8x7B and 8x22B."""


def _gpt_oss_options(hf: PreTrainedConfig) -> Options:
    if not hf.attention_bias:
        raise ModelError("attention_bias=false in config.json: the megatron learner has gpt-oss with biases only")
    return local_options(hf) | {
        "add_bias_linear": True,
        "add_qkv_bias": True,
        # Older versions of transformers have both numbers in their code.
        "activation_func": partial(_scaled_silu, getattr(hf, "swiglu_alpha", 1.702)),
        "activation_func_clamp_value": getattr(hf, "swiglu_limit", 7.0),
        "glu_linear_offset": 1.0,
        "bias_activation_fusion": False,
    }


def _scaled_silu(alpha: float, gate: torch.Tensor) -> torch.Tensor:
    return gate * torch.sigmoid(alpha * gate)


def _gpt_oss_layer(hf: PreTrainedConfig, layer: int) -> list[Weight]:
    at, experts = at_layer(layer), hf.num_local_experts
    return [
        *norms(hf, layer),
        *attention(hf, layer, bias=True, output_bias=True),
        same("self_attention.core_attention.sinks", at("self_attn.sinks", hf.num_attention_heads), "rows"),
        *router(hf, layer, experts, "mlp.router"),
        same("mlp.router.bias", at("mlp.router.bias", experts)),
    ]


def _gpt_oss_experts(hf: PreTrainedConfig, layer: int) -> list[StackedWeight]:
    at, experts, hidden, size = at_layer(layer), hf.num_local_experts, hf.hidden_size, hf.intermediate_size
    return [
        StackedWeight("linear_fc1.weight", at("mlp.experts.gate_up_proj", experts, hidden, 2 * size)),
        StackedWeight("linear_fc1.bias", at("mlp.experts.gate_up_proj_bias", experts, 2 * size)),
        StackedWeight("linear_fc2.weight", at("mlp.experts.down_proj", experts, size, hidden)),
        StackedWeight("linear_fc2.bias", at("mlp.experts.down_proj_bias", experts, hidden)),
    ]


GPT_OSS = Family("gpt_oss", _gpt_oss_options, _gpt_oss_layer, stacked=_gpt_oss_experts, window=layer_window, sinks=True)
"""gpt-oss: attention sinks, biases, sliding windows in every other layer, gated experts with limits."""
