"""Qwen2 and Qwen2.5: biases of queries, keys and values."""

from __future__ import annotations

from typing import Any

from agentrl.learner.megatron.families.base import Family, Options, Weight, attention, dense_options, mlp, norms


def _options(hf: Any) -> Options:
    return dense_options(hf, add_qkv_bias=True)


def _layer(hf: Any, layer: int) -> list[Weight]:
    return [*norms(hf, layer), *attention(hf, layer, bias=True), *mlp(hf, layer, hf.intermediate_size)]


FAMILY = Family("qwen2", _options, _layer)
