"""Qwen3: norms of queries and keys."""

from __future__ import annotations

from typing import Any

from agentrl.learner.megatron.families.base import Family, Options, Weight, attention, dense_options, mlp, norms, refuse


def _options(hf: Any) -> Options:
    refuse(hf, "attention_bias")
    return dense_options(hf, qk_layernorm=True)


def _layer(hf: Any, layer: int) -> list[Weight]:
    return [*norms(hf, layer), *attention(hf, layer, qk_norm=True), *mlp(hf, layer, hf.intermediate_size)]


FAMILY = Family("qwen3", _options, _layer)
