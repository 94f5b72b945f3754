"""Options that pass through to Megatron-Core: ``learner.megatron.*``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from agentrl.config.validation import nearest_key
from agentrl.core.errors import ConfigError
from agentrl.learner.megatron.families.base import Options
from agentrl.learner.megatron.layout import Layout

_KEY = "learner.megatron"
_CLASSES: tuple[Any, ...] = (TransformerConfig, MLATransformerConfig, DistributedDataParallelConfig, OptimizerConfig)


def options_of(cls: Any, options: Mapping[str, Any]) -> Options:
    """Return those options that a configuration class of Megatron-Core has; several classes may have one.

    Raises:
        ConfigError: no class has one of them.

    """
    known = {name for each in _CLASSES for name in _names(each)} | {*Layout.__slots__}
    for name in options:
        if name not in known:
            near = nearest_key(name, sorted(known))
            hint = f"; did you mean {_KEY}.{near}?" if near else ""
            raise ConfigError(f"{_KEY}.{name}: Megatron-Core has no such option{hint}")
    return {name: value for name, value in options.items() if name in _names(cls)}


def _names(cls: Any) -> set[str]:
    return {field.name for field in fields(cls) if field.init}


def transformer_config(
    model: Options, options: Mapping[str, Any], *, device: torch.device, dtype: torch.dtype
) -> TransformerConfig:
    """Return the configuration of a model's layers.

    Args:
        model: of the family (`Family.options`); they cannot be changed.
        options: the options ``learner.megatron``.
        device: of the rank.
        dtype: of the parameters.

    Raises:
        ConfigError: an option is unknown, set by the model, or refused by Megatron-Core.

    """
    cls = MLATransformerConfig if model.get("multi_latent_attention") else TransformerConfig
    chosen = options_of(cls, options)
    for name in chosen:
        if name in model:
            raise ConfigError(f"{_KEY}.{name}: the model's config.json sets it to {model[name]!r}; leave it out")
    try:
        return cls(**_defaults(device, dtype) | chosen | model)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"{_KEY}: Megatron-Core refuses these options: {error}") from error


def _defaults(device: torch.device, dtype: torch.dtype) -> Options:
    """Return what is set if no option does."""
    fused = device.type == "cuda"
    return {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "perform_initialization": False,
        # The loss is a sum over tokens, with weights.
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
        # Fusions that need no package besides torch.
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        # Routing is the engines': nothing pushes it towards a balance.
        "moe_router_load_balancing_type": "none",
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
    }
