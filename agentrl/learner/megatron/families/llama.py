"""Llama 2 and 3, and models of its architecture such as SmolLM2."""

from __future__ import annotations

from typing import Any

from agentrl.learner.megatron.families.base import Family, Options, Weight, attention, dense_options, mlp, norms, refuse


def _options(hf: Any) -> Options:
    refuse(hf, "attention_bias", "mlp_bias")
    return dense_options(hf)


def _layer(hf: Any, layer: int) -> list[Weight]:
    return [*norms(hf, layer), *attention(hf, layer), *mlp(hf, layer, hf.intermediate_size)]


FAMILY = Family("llama", _options, _layer)
