"""The families of models that the Megatron-Core learner can train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentrl.core.errors import ModelError
from agentrl.learner.megatron.families import deepseek_v3, glm4, glm4_moe, llama, qwen2, qwen3, qwen3_moe
from agentrl.learner.megatron.families.base import Family

FAMILIES: dict[str, Family] = {
    "deepseek_v3": deepseek_v3.FAMILY,
    "glm4": glm4.FAMILY,
    "glm4_moe": glm4_moe.FAMILY,
    "kimi_k2": deepseek_v3.FAMILY,  # another name, no other model
    "llama": llama.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
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
