"""GLM-4-0414 and GLM-Z1: norms after attention and MLP, rotary embedding of half of each head, in neighbouring pairs."""

from __future__ import annotations

from typing import Any

from agentrl.learner.megatron.families.base import (
    Family,
    Options,
    Weight,
    at_layer,
    attention,
    dense_options,
    fused_gate_up,
    norms,
    same,
)


def _options(hf: Any) -> Options:
    return dense_options(hf, add_qkv_bias=hf.attention_bias, rotary_interleaved=True)


def _layer(hf: Any, layer: int) -> list[Weight]:
    at, hidden, size = at_layer(layer), hf.hidden_size, hf.intermediate_size
    post_norms = ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight")
    return [
        *norms(hf, layer),
        *(same(name, at(name, hidden)) for name in post_norms),
        *attention(hf, layer, bias=hf.attention_bias),
        fused_gate_up("mlp.linear_fc1.weight", at("mlp.gate_up_proj.weight", 2 * size, hidden)),
        same("mlp.linear_fc2.weight", at("mlp.down_proj.weight", hidden, size), "columns"),
    ]


FAMILY = Family("glm4", _options, _layer, post_norms=True)
