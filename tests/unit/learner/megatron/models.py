"""Tiny random models of every family, with norms and biases that are not those of a new model."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        },
    },
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32,
        },
    },
}  # fmt: skip


def make_model(folder: Path, family: str, **options: object) -> Path:
    """Save a random model of a family as a Hugging Face folder."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family] | options)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                tensor.uniform_(0.5, 1.5)
            elif "inv_freq" not in name:
                tensor.normal_(0, 0.2)
    model.save_pretrained(folder)
    return folder
