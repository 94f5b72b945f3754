"""Options that pass through to Megatron-Core: ``learner.megatron.*``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from agentrl.config.learner import LearnerConfig, Recompute
from agentrl.config.learner import OptimizerConfig as OptimizerSection
from agentrl.core.errors import ConfigError
from agentrl.learner.device import recompute_mode
from agentrl.learner.megatron.families.base import Options
from agentrl.learner.megatron.layout import RECOMPUTE

_KEY = "learner.megatron"
_DATA_PARALLEL: Options = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True}


def select_options(cls: Any, options: Mapping[str, object]) -> Options:
    """Return the options that are fields of a configuration class of Megatron-Core; classes may share a field."""
    names = {field.name for field in fields(cls) if field.init}
    return {name: value for name, value in options.items() if name in names}


def transformer_config(
    model: Options, options: Mapping[str, object], *, device: torch.device, dtype: torch.dtype
) -> TransformerConfig:
    """Return the configuration of a model's layers.

    Args:
        model: of the family (`Family.options`); they cannot be changed.
        options: the options ``learner.megatron``.
        device: of the rank.
        dtype: of the parameters.

    Raises:
        ConfigError: Megatron-Core refuses an option.
    """
    cls = MLATransformerConfig if model.get("multi_latent_attention") else TransformerConfig
    chosen = select_options(cls, options)
    if not model.get("num_moe_experts"):
        # A reference without experts may have a policy with them.
        chosen = {name: value for name, value in chosen.items() if not name.startswith("expert_")}
    config: TransformerConfig = _create(cls, _defaults(model, device, dtype) | chosen | model)
    return config


def _defaults(model: Options, device: torch.device, dtype: torch.dtype) -> Options:
    """Return the values of fields that no option sets."""
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
        # Layers are compiled as a whole, experts are not.
        "bias_activation_fusion": device.type == "cuda" and bool(model.get("num_moe_experts")),
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "moe_router_load_balancing_type": "none",
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
    }


def learner_options(config: LearnerConfig) -> Options:
    """Return the options ``learner.megatron``, with those that follow from them and from other keys of ``learner``."""
    options = dict(config.megatron)
    if options.get("virtual_pipeline_model_parallel_size"):
        # With Megatron-Core's defaults, stages get wrong inputs without an error.
        options = {"overlap_p2p_comm": True, "batch_p2p_comm": False} | options
    return options


def recomputed_layers(config: LearnerConfig) -> Recompute:
    """Return what agentrl recomputes in the backward pass: nothing, if Megatron-Core recomputes."""
    return "none" if RECOMPUTE in config.megatron else recompute_mode(config)


def data_parallel_config(options: Mapping[str, object]) -> DistributedDataParallelConfig:
    """Return how gradients are added up over data-parallel ranks, in float32.

    Raises:
        ConfigError: Megatron-Core refuses an option.
    """
    return _create(
        DistributedDataParallelConfig, _DATA_PARALLEL | select_options(DistributedDataParallelConfig, options)
    )


def optimizer_config(optimizer: OptimizerSection, options: Mapping[str, object], dtype: torch.dtype) -> OptimizerConfig:
    """Return the configuration of AdamW with float32 weights.

    Args:
        optimizer: of the learner, without ``auto``.
        options: the options ``learner.megatron``.
        dtype: of the parameters.

    Raises:
        ConfigError: Megatron-Core refuses an option.
    """
    fixed = {
        "lr": optimizer.fixed_lr,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_eps": optimizer.eps,
        "clip_grad": optimizer.max_grad_norm,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
    }
    defaults = {"use_distributed_optimizer": True}
    return _create(OptimizerConfig, defaults | select_options(OptimizerConfig, options) | fixed)


def _create(cls: Any, options: Options) -> Any:
    try:
        return cls(**options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"{_KEY}: Megatron-Core refuses these options: {error}") from error
