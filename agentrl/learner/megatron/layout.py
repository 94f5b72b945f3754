"""How the ranks of a Megatron-Core learner divide a model. Only `Layout.start` imports Megatron-Core."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from agentrl.core.errors import ConfigError

RECOMPUTE = "recompute_granularity"
"""Option with which Megatron-Core computes layers again, in place of ``learner.recompute``."""
_KEY = "learner.megatron"
UNEVEN_STAGES = (
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Options with which stages have different numbers of layers."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the parallel groups, with the names of Megatron-Core's options."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    """None is the size of tensor parallelism."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Layout:
        """Return the layout in the options ``learner.megatron``."""
        sizes = {name: options[name] for name in cls.__slots__ if name in options}
        for name, size in sizes.items():
            if not (isinstance(size, int) and size > 0) and size is not None:
                raise ConfigError(f"{_KEY}.{name}={size!r} is not a number of ranks; set it to 1 or more")
        return cls(**sizes)

    @property
    def ranks_per_replica(self) -> int:
        """Ranks of one data-parallel replica: they compute the same rows together."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def expert_tensor_size(self) -> int:
        """Ranks that divide an expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def chunks(self) -> int:
        """Parts of the model on one rank."""
        return self.virtual_pipeline_model_parallel_size or 1

    def check(self, model: Mapping[str, Any], options: Mapping[str, Any], ranks: int) -> None:
        """Check that ``ranks`` can divide the model.

        Args:
            model: fields of ``TransformerConfig`` (`Family.options`), and ``vocab_size``.
            options: the options ``learner.megatron``.
            ranks: ``learner.ranks``.

        Raises:
            ConfigError: they cannot; the message has values and keys.
        """
        _check_divisible(
            ranks, "learner.ranks", self.ranks_per_replica, "tensor times pipeline times context parallel size"
        )
        experts = self.expert_tensor_size * self.expert_model_parallel_size * self.pipeline_model_parallel_size
        _check_divisible(ranks, "learner.ranks", experts, "expert tensor times expert times pipeline parallel size")
        tensor = self.tensor_model_parallel_size
        sizes = {name: model.get(name) for name in ("num_attention_heads", "ffn_hidden_size", "vocab_size")}
        if model.get("multi_latent_attention"):
            sizes["q_lora_rank"] = model["q_lora_rank"]
            sizes["kv_lora_rank + qk_rope_head_dim"] = model["kv_lora_rank"] + model["qk_pos_emb_head_dim"]
        sizes["shared experts' size"] = model.get("moe_shared_expert_intermediate_size")
        for name, size in sizes.items():
            if size is not None:
                _check_divisible(size, f"the model's {name}", tensor, f"{_KEY}.tensor_model_parallel_size")
        heads = model["num_attention_heads"] // tensor
        if heads % self.context_parallel_size:
            raise ConfigError(
                f"{_KEY}.context_parallel_size={self.context_parallel_size} does not divide the {heads} attention heads of a "
                f"rank (the model's num_attention_heads={heads * tensor} over {_KEY}.tensor_model_parallel_size={tensor}); set "
                f"it to {_divisors(heads)}"
            )
        groups = model["num_query_groups"]
        if groups % tensor and tensor % groups:
            raise ConfigError(
                f"{_KEY}.tensor_model_parallel_size={tensor} neither divides the model's num_key_value_heads={groups} nor "
                f"is a multiple of it; set it to {_divisors(groups)}"
            )
        if model.get("num_moe_experts"):
            if tensor > 1 and not options.get("sequence_parallel"):
                raise ConfigError(
                    f"{_KEY}.tensor_model_parallel_size={tensor} with experts needs {_KEY}.sequence_parallel=true"
                )
            name = f"{_KEY}.expert_model_parallel_size"
            _check_divisible(model["num_moe_experts"], "the model's experts", self.expert_model_parallel_size, name)
            name = f"{_KEY}.expert_tensor_parallel_size"
            if model.get("add_bias_linear") and self.expert_tensor_size > 1:
                raise ConfigError(
                    f"{name}={self.expert_tensor_size}: experts with biases are not divided; set {name}=1"
                )
            _check_divisible(
                model["moe_ffn_hidden_size"], "the model's moe_intermediate_size", self.expert_tensor_size, name
            )
        stages = self.pipeline_model_parallel_size * self.chunks
        if not any(options.get(name) for name in UNEVEN_STAGES):
            _check_divisible(
                model["num_layers"],
                "the model's num_hidden_layers",
                stages,
                f"{_KEY}.pipeline_model_parallel_size times virtual_pipeline_model_parallel_size",
                f"or give the stages their layers with {_KEY}.{UNEVEN_STAGES[0]}",
            )

    def start(self, seed: int, timeout_s: float = 1800.0) -> None:
        """Create the process groups of this layout, and seed the random states of Megatron-Core. Collective.

        Args:
            seed: the same on all ranks.
            timeout_s: time limit of what the ranks of a group compute together.
        """
        from megatron.core import parallel_state, tensor_parallel
        from torch.distributed.distributed_c10d import _set_pg_timeout

        sizes = {name: getattr(self, name) for name in self.__slots__}
        parallel_state.initialize_model_parallel(**sizes, distributed_timeout_minutes=math.ceil(timeout_s / 60))
        # Megatron-Core does not set a limit for this group.
        _set_pg_timeout(timedelta(seconds=timeout_s), parallel_state.get_expert_data_parallel_group_gloo())
        tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _check_divisible(number: int, number_name: str, size: int, key: str, hint: str = "") -> None:
    if number % size:
        raise ConfigError(
            f"{key}={size} does not divide {number_name}={number}; set it to {_divisors(number)} {hint}".rstrip()
        )


def _divisors(number: int) -> str:
    """Return the small divisors of a number in words."""
    *first, last = [str(size) for size in range(1, min(number, 128) + 1) if number % size == 0]
    return f"{', '.join(first)} or {last}" if first else last
