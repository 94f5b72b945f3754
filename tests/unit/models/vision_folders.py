"""Hugging Face folders of tiny vision-language models with random weights."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

VOCABULARY = 512
IMAGE_TOKEN = 500
"""Stands for an image's features in all of them."""
SPECIAL = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 501,
    "vision_start_token_id": 502,
    "vision_end_token_id": 503,
}
_GLM = {"image_token_id": IMAGE_TOKEN, "video_token_id": 501, "image_start_token_id": 502, "image_end_token_id": 503}
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "eos_token_id": 3,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
_QWEN_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_PATCHES = {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_heads": 2, "out_hidden_size": 64}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_5_vl": {
        **SPECIAL,
        "text_config": _TEXT | {"rope_parameters": _QWEN_ROPE, "layer_types": ["full_attention"] * 3},
        "vision_config": {
            **_PATCHES,
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    },
    "qwen3_vl": {
        **SPECIAL,
        "text_config": _TEXT | {"rope_parameters": _QWEN_ROPE},
        "vision_config": {
            **_PATCHES,
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    },
    "glm4v": {
        **_GLM,
        "text_config": _TEXT | {"rope_parameters": _QWEN_ROPE | {"partial_rotary_factor": 1.0}},
        "vision_config": {**_PATCHES, "depth": 2, "hidden_size": 32, "intermediate_size": 48, "image_size": 32},
    },
    "glm4v_moe": {
        **_GLM,
        "text_config": _TEXT
        | {
            "rope_parameters": _QWEN_ROPE | {"partial_rotary_factor": 1.0},
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
        "vision_config": {**_PATCHES, "depth": 2, "hidden_size": 32, "intermediate_size": 48, "image_size": 32},
    },
    "smolvlm": {
        "image_token_id": IMAGE_TOKEN,
        "pad_token_id": 0,
        "scale_factor": 2,
        "text_config": _TEXT | {"model_type": "llama"},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 4,
            "image_size": 16,
        },
    },
}
"""By ``model_type``."""
FAMILIES: Sequence[str] = tuple(CONFIGS)


def vision_config(family: str) -> Any:
    """Return the configuration of a tiny model in transformers."""
    for_model: Any = AutoConfig.for_model
    return for_model(family, **CONFIGS[family])


def vision_model(family: str, seed: int = 0) -> Any:
    """Return a tiny model with random weights, large enough that images change the log-probabilities of text."""
    torch.manual_seed(seed)
    from_config: Any = AutoModelForImageTextToText.from_config
    model = from_config(vision_config(family), attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.12)
    return model


def write_vision_model(folder: Path, family: str, seed: int = 0) -> Path:
    """Write a tiny model; return its folder."""
    vision_model(family, seed).save_pretrained(folder)
    return folder
