"""Qwen3 with mixtures of experts, such as Qwen3-30B-A3B."""

from __future__ import annotations

from typing import Any

from agentrl.learner.megatron.families.base import Family, Options, Weight, attention, dense_options, mlp, norms, refuse
from agentrl.learner.megatron.families.experts import expert, router


def _has_experts(hf: Any, layer: int) -> bool:
    return layer not in hf.mlp_only_layers and (layer + 1) % hf.decoder_sparse_step == 0


def _options(hf: Any) -> Options:
    refuse(hf, "attention_bias")
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


def _layer(hf: Any, layer: int) -> list[Weight]:
    experts = _has_experts(hf, layer)
    last = router(hf, layer, hf.num_experts) if experts else mlp(hf, layer, hf.intermediate_size)
    return [*norms(hf, layer), *attention(hf, layer, qk_norm=True), *last]


FAMILY = Family("qwen3_moe", _options, _layer, expert)
