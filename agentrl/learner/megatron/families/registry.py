"""The families of models that the Megatron-Core learner can train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentrl.core.errors import ModelError
from agentrl.learner.megatron.families.base import (
    Family,
    Options,
    Weight,
    at_layer,
    attention,
    dense_options,
    fused_gate_up,
    mlp,
    norms,
    refuse,
    same,
)
from agentrl.learner.megatron.families.experts import DEEPSEEK_V3, GLM4_MOE, QWEN3_MOE


def _dense(hf_type: str, *refused: str, bias: bool = False, qk_norm: bool = False) -> Family:
    """Return a family of plain decoders; its configurations may not set the fields ``refused``."""

    def options(hf: Any) -> Options:
        refuse(hf, *refused)
        return dense_options(hf, add_qkv_bias=bias, qk_layernorm=qk_norm)

    def weights(hf: Any, layer: int) -> list[Weight]:
        heads = attention(hf, layer, bias=bias, qk_norm=qk_norm)
        return [*norms(hf, layer), *heads, *mlp(hf, layer, hf.intermediate_size)]

    return Family(hf_type, options, weights)


def _glm4_layer(hf: Any, layer: int) -> list[Weight]:
    at, hidden, size = at_layer(layer), hf.hidden_size, hf.intermediate_size
    post_norms = ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight")
    return [
        *norms(hf, layer),
        *(same(name, at(name, hidden)) for name in post_norms),
        *attention(hf, layer, bias=hf.attention_bias),
        fused_gate_up("mlp.linear_fc1.weight", at("mlp.gate_up_proj.weight", 2 * size, hidden)),
        same("mlp.linear_fc2.weight", at("mlp.down_proj.weight", hidden, size), "columns"),
    ]


def _glm4_options(hf: Any) -> Options:
    return dense_options(hf, add_qkv_bias=hf.attention_bias, rotary_interleaved=True)


FAMILIES: dict[str, Family] = {
    "deepseek_v3": DEEPSEEK_V3,
    # GLM-4-0414 and GLM-Z1: norms after attention and MLP, rotary embedding of half of each head, in neighbouring pairs
    "glm4": Family("glm4", _glm4_options, _glm4_layer, post_norms=True),
    "glm4_moe": GLM4_MOE,
    "kimi_k2": DEEPSEEK_V3,  # another name, no other model
    "llama": _dense("llama", "attention_bias", "mlp_bias"),  # Llama 2 and 3, SmolLM2 and the like
    "qwen2": _dense("qwen2", bias=True),  # and Qwen2.5
    "qwen3": _dense("qwen3", "attention_bias", qk_norm=True),
    "qwen3_moe": QWEN3_MOE,
}
"""By ``model_type`` in ``config.json``."""


def read_family(folder: Path, key: str) -> tuple[Family, Any]:
    """Return the family of the model in a Hugging Face folder, and its configuration in transformers.

    Args:
        folder: with ``config.json``.
        key: configuration key of the folder, for messages.

    Raises:
        ModelError: there is no readable configuration, or no such family.
    """
    from transformers import AutoConfig

    path = folder / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        kind = fields.pop("model_type")
        fields.pop("quantization_config", None)  # `WeightFiles` reads it
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{key}={folder}: {path.name} is no configuration of a model: {error!r}") from error
    if kind not in FAMILIES:
        raise ModelError(
            f"{key}={folder}: the megatron learner has no models with model_type={kind!r}, only "
            f"{', '.join(sorted(FAMILIES))}; set learner.backend=fsdp"
        )
    family = FAMILIES[kind]
    return family, AutoConfig.for_model(family.hf_type, **fields)
