"""The families of models that the Megatron-Core learner can train."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import ModelError
from agentrl.learner.megatron.families.base import (
    Family,
    Options,
    Weight,
    at_layer,
    attention,
    dense_options,
    fused_gate_up,
    layer_window,
    mlp,
    no_window,
    norms,
    refuse,
    same,
)
from agentrl.learner.megatron.families.experts import DEEPSEEK_V3, GLM4_MOE, GPT_OSS, MIXTRAL, QWEN3_MOE

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _dense(
    hf_type: str,
    *refused: str,
    bias: bool = False,
    qk_norm: bool = False,
    window: Callable[[PreTrainedConfig, int], int | None] = no_window,
) -> Family:
    """Return a family of plain decoders; its configurations may not set the fields ``refused``."""

    def options(hf: PreTrainedConfig) -> Options:
        refuse(hf, *refused)
        return dense_options(hf, add_qkv_bias=bias, qk_layernorm=qk_norm)

    def weights(hf: PreTrainedConfig, layer: int) -> list[Weight]:
        heads = attention(hf, layer, bias=bias, qk_norm=qk_norm)
        return [*norms(hf, layer), *heads, *mlp(hf, layer, hf.intermediate_size)]

    return Family(hf_type, options, weights, window=window)


def _glm4_layer(hf: PreTrainedConfig, layer: int) -> list[Weight]:
    at, hidden, size = at_layer(layer), hf.hidden_size, hf.intermediate_size
    post_norms = ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight")
    return [
        *norms(hf, layer),
        *(same(name, at(name, hidden)) for name in post_norms),
        *attention(hf, layer, bias=hf.attention_bias),
        fused_gate_up("mlp.linear_fc1.weight", at("mlp.gate_up_proj.weight", 2 * size, hidden)),
        same("mlp.linear_fc2.weight", at("mlp.down_proj.weight", hidden, size), "columns"),
    ]


def _glm4_options(hf: PreTrainedConfig) -> Options:
    return dense_options(hf, add_qkv_bias=hf.attention_bias, rotary_interleaved=True)


FAMILIES: dict[str, Family] = {
    "deepseek_v3": DEEPSEEK_V3,
    # GLM-4-0414 and GLM-Z1: norms after attention and MLP, rotary embedding of half of each head, in neighbouring pairs
    "glm4": Family("glm4", _glm4_options, _glm4_layer, post_norms=True),
    "glm4_moe": GLM4_MOE,
    "gpt_oss": GPT_OSS,
    "kimi_k2": DEEPSEEK_V3,  # another name, no other model
    "llama": _dense("llama", "attention_bias", "mlp_bias"),  # Llama 2 and 3, SmolLM2 and the like
    "mixtral": MIXTRAL,
    "qwen2": _dense("qwen2", bias=True, window=layer_window),  # and Qwen2.5
    "qwen2_5_vl": replace(_dense("qwen2_5_vl", bias=True, window=layer_window), reads_images=True),
    "qwen3": _dense("qwen3", "attention_bias", qk_norm=True, window=layer_window),
    "qwen3_moe": QWEN3_MOE,
    "qwen3_vl": replace(_dense("qwen3_vl", "attention_bias", qk_norm=True), reads_images=True),
}
"""By ``model_type`` in ``config.json``."""
_REASONS = {
    "deepseek_v32": "its layers attend to keys that an indexer selects",
    "glm_moe_dsa": "its layers attend to keys that an indexer selects",
    "kimi_linear": "its layers have linear attention, which would mix packed rows",
    "mistral3": "its weights are those of a model of pictures and texts",
    "qwen3_5": "its layers have linear attention, which would mix packed rows",
    "qwen3_5_moe": "its layers have linear attention, which would mix packed rows",
    "qwen3_next": "its layers have linear attention, which would mix packed rows",
}
"""Why the learner lacks families for which users look, by ``model_type``."""


def read_family(folder: Path, key: str) -> tuple[Family, Any]:
    """Return the family of the model in a Hugging Face folder, and its configuration in transformers, or that of its text part.

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
        reads_images = isinstance(fields.get("vision_config"), dict)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{key}={folder}: {path.name} is no configuration of a model: {error!r}") from error
    if kind not in FAMILIES:
        reason = f", as {_REASONS[kind]}" if kind in _REASONS else ""
        if reads_images and not reason:
            readers = ", ".join(sorted(name for name in FAMILIES if FAMILIES[name].reads_images))
            reason = f", and of models with images only {readers}"
        raise ModelError(
            f"{key}={folder}: the megatron learner has no models with model_type={kind!r}{reason}, only "
            f"{', '.join(sorted(FAMILIES))}; set learner.backend=fsdp"
        )
    family = FAMILIES[kind]
    hf: Any = AutoConfig.for_model(family.hf_type, **fields)
    if not family.reads_images:
        return family, hf
    hf.text_config.tie_word_embeddings = hf.tie_word_embeddings
    return replace(family, whole=hf), hf.text_config
