"""Tiny random models of every family, the layouts of two ranks, and a micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.models.load import load_value_model, value_head

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
MODELS: dict[str, dict[str, object]] = {
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        },
    },
    "qwen2": {
        "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "gpt_oss": {
        "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen3_moe": {
        "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "mlp_only_layers": [1], "norm_topk_prob": True,
    },
    "glm4": {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    "glm4_moe": {
        "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    },
    "deepseek_v3": {
        "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32,
            "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
        },
    },
    "one_key_head": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "moonlight": {
        "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
        "q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
        "rms_norm_eps": 1e-3,
    },
    "qwen3": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32,
        },
    },
}  # fmt: skip
"""By name, what is changed in the family's configuration."""
FAMILIES = {"moonlight": "deepseek_v3", "one_key_head": "qwen2"}
"""Of models whose name is not their family's."""

TP, SP, PP = {"tensor_model_parallel_size": 2}, {"sequence_parallel": True}, {"pipeline_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
EP, VPP = {"expert_model_parallel_size": 2}, {"virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": True}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "TP2": ("qwen2", TP),
    "TP2, one key head": ("one_key_head", TP),
    "TP2, SP, fused MLP": ("glm4", TP | SP),
    "TP2, SP, experts": ("glm4_moe", TP | SP),
    "TP2, SP, EP2, ETP1": ("deepseek_v3", TP | SP | EP | {"expert_tensor_parallel_size": 1}),
    "EP2": ("qwen3_moe", EP),
    "TP2, SP, EP2, ETP1, sinks": ("gpt_oss", TP | SP | EP | {"expert_tensor_parallel_size": 1}),
    "CP2, sinks": ("gpt_oss", CP),
    "PP2, w1 and w3": ("mixtral", PP),
    "CP2": ("qwen3", CP),
    "CP2, latent attention": ("deepseek_v3", CP),
    "PP2, tied": ("qwen2", PP),
    "PP2, experts": ("deepseek_v3", PP),
    "PP2, VPP2": ("llama", PP | VPP),
}
"""By name: the model, and the options ``learner.megatron``."""
LENGTHS = (23, 9, 14)


def rows(lengths: tuple[int, ...] = LENGTHS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, positions and rows of a micro-batch."""
    token_ids_L = torch.randint(96, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    positions_L = torch.cat([torch.arange(length) for length in lengths])
    return token_ids_L, positions_L, torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def weighted(logits: torch.Tensor) -> torch.Tensor:
    """Return the sum of logits with different weights: a loss."""
    return (logits.flatten() * torch.arange(logits.numel()).cos()).sum()


def model_config(name: str, **options: object) -> Any:
    """The configuration of a model in transformers."""
    return AutoConfig.for_model(FAMILIES.get(name, name), **SIZES | MODELS.get(name, {}) | options)


def add_draft_layer(folder: Path) -> Path:
    """Add a weight of a layer of multi-token prediction to a model."""
    weights = load_file(folder / "model.safetensors")
    weights[f"model.layers.{SIZES['num_hidden_layers']}.eh_proj.weight"] = torch.rand(3, 5)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_critic_model(policy: Path, folder: Path) -> Path:
    """Save the model in ``policy`` with a random value head."""
    model = load_value_model(policy)
    with torch.no_grad():
        for number, parameter in enumerate(value_head(model).parameters()):
            parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(number))
    model.save_pretrained(folder)
    return folder


def make_model(folder: Path, name: str, **options: object) -> Path:
    """Save a random model as a Hugging Face folder."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(model_config(name, **options), dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                tensor.uniform_(0.5, 1.5)
            elif "inv_freq" not in name:
                tensor.normal_(0, 0.2)
    model.save_pretrained(folder)
    return folder
