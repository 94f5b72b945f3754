"""GLM-4.5, 4.6 and 4.7: mixtures of experts with a sigmoid router, rotary embedding of half of each head."""

from __future__ import annotations

from typing import Any

from agentrl.learner.megatron.families.base import Family, Options, Weight, attention, dense_options, norms
from agentrl.learner.megatron.families.experts import expert, sigmoid_layer, sigmoid_options


def _options(hf: Any) -> Options:
    return dense_options(hf, add_qkv_bias=hf.attention_bias, qk_layernorm=hf.use_qk_norm) | sigmoid_options(hf)


def _layer(hf: Any, layer: int) -> list[Weight]:
    heads = attention(hf, layer, bias=hf.attention_bias, qk_norm=hf.use_qk_norm)
    return [*norms(hf, layer), *heads, *sigmoid_layer(hf, layer)]


FAMILY = Family("glm4_moe", _options, _layer, expert)
