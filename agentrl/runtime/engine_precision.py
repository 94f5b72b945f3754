"""Precision of the engines that a run starts: what they have in float8, and whether they can take new weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl.config.engine_groups import all_samplers
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError
from agentrl.distributed.base import TensorSpec
from agentrl.inference.client.precision import SELF_QUANTIZED
from agentrl.models.engine_float8 import (
    EngineFloat8,
    check_published,
    engine_overrides,
    has_float8_engines,
    read_engine_float8,
)
from agentrl.models.load import read_counts, read_experts, read_model_type
from agentrl.models.weight_files import WeightFiles

PrecisionClass = Literal["dense", "experts", "float8_weights", "float8_cache"]
"""Engines whose log-probabilities differ from the learner's by about the same: bfloat16 of dense models and of mixtures of
experts, float8 weights, and a float8 KV cache, whatever the weights."""
_SELF_QUANTIZED_FAMILIES = ("qwen2", "qwen3")
"""``model_type`` of models that SGLang 0.5.23 takes with ``load_format=flash_rl``."""
_MERGED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_COLUMNS = (*_MERGED, "q_b_proj", "kv_b_proj")
_BY_ROWS = ("o_proj", "down_proj")
"""Last part of the names of modules whose output, or whose input, SGLang divides among tensor-parallel ranks; the first are
joined, so that each part must consist of whole blocks."""


@dataclass(frozen=True, slots=True)
class EnginePrecision:
    """In what the policy's engines compute."""

    weights: str
    """``float8``, or the dtype of all weights; ``float32`` for the embedded engine by default."""
    cache: str
    """SGLang's ``kv_cache_dtype``; ``auto`` is that of the weights that are not float8."""
    experts: bool
    """Whether the model is a mixture of experts."""

    @property
    def band(self) -> PrecisionClass:
        """The class whose limits apply to the gap between engine and learner."""
        if self.cache.startswith(("fp8", "fp4")):
            return "float8_cache"
        if self.weights == "float8":
            return "float8_weights"
        return "experts" if self.experts else "dense"

    def __str__(self) -> str:
        """Return it in words."""
        words = f"matrices of decoder layers in {self.weights}, others bfloat16" if self.weights == "float8" else ""
        cache = f"KV cache {self.cache}" if self.cache != "auto" else ""
        return ", ".join(filter(None, (words, cache)))


def read_precision(config: Config, folder: Path) -> EnginePrecision:
    """Return in what the engines of a run compute, as far as configuration and the model's folder say.

    Raises:
        ModelError: ``config.json`` cannot be read.
    """
    sampler, experts = config.sampler, read_experts(folder) > 0
    if not sampler.uses_sglang:
        return EnginePrecision(sampler.embedded.dtype, "auto", experts)
    is_float8 = has_float8_engines(config.weights.dtype, folder) or sampler.sglang_option("quantization") == "fp8"
    weights = "float8" if is_float8 else str(sampler.sglang_option("dtype", "bfloat16"))
    return EnginePrecision(weights, str(sampler.sglang_option("kv_cache_dtype", "auto")), experts)


def check_precision(config: Config, folder: Path, files: WeightFiles | None = None) -> None:
    """Check that the engines of a run take the weights that the learner sends.

    Args:
        config: of the run.
        folder: of the policy.
        files: its weights; None: only ``config.json`` is there.

    Raises:
        ConfigError: they are quantised in a way in which SGLang takes no new weights, or do not consist of whole blocks.
        ModelError: ``config.json`` cannot be read.
    """
    sampler, dtype = config.sampler, config.weights.dtype
    if not sampler.uses_sglang:
        if dtype == "float8":
            raise ConfigError(
                "weights.dtype=float8 with sampler.backend=embedded: it has no float8; set sampler.backend=sglang"
            )
        return
    if sampler.urls:
        return
    _check_options(config, folder)
    overrides = engine_overrides(dtype, folder)
    if overrides is not None:
        check_random_start(config)
    if not has_float8_engines(dtype, folder):
        return
    form = read_engine_float8(folder)
    if files is None:
        return
    layers = read_counts(folder, "num_hidden_layers")
    specs = [spec for spec in files.specs() if _layer(spec.name) < layers]
    if files.float8_names:
        check_published(form, specs, files.float8_names, f"model.path={config.model.path}")
    if not sampler.sglang_option("enable_dp_attention"):
        for _, engines in all_samplers(sampler):
            group_config = config.model_copy(update={"sampler": engines})
            _check_blocks(group_config, form, specs, read_counts(folder, "num_key_value_heads"))


def _check_options(config: Config, folder: Path) -> None:
    sampler = config.sampler
    if (torchao := sampler.sglang_option("torchao_config")) is not None:
        raise ConfigError(
            f"sampler.sglang.torchao_config={torchao}: SGLang takes no new weights after it has quantised them; leave it out"
        )
    option = sampler.sglang_option("quantization")
    is_float8 = has_float8_engines(config.weights.dtype, folder)
    if option is None or (option == "fp8" and is_float8):
        return
    if option == "fp8" and sampler.sglang_option("load_format") == SELF_QUANTIZED:
        kind = read_model_type(folder)
        if kind in _SELF_QUANTIZED_FAMILIES:
            return
        raise ConfigError(
            f"sampler.sglang.load_format={SELF_QUANTIZED} with model_type={kind!r}: SGLang 0.5.23 takes "
            f"{', '.join(_SELF_QUANTIZED_FAMILIES)} only; set weights.dtype=float8 in its place"
        )
    raise ConfigError(
        f"sampler.sglang.quantization={option}: SGLang takes no new weights after it has quantised them; leave it out, and "
        "set weights.dtype=float8 for engines in float8"
    )


def check_random_start(config: Config) -> None:
    """Check that nothing needs the weights of the engines' folder: engines start with others.

    Raises:
        ConfigError: something does.
    """
    dtype = config.weights.dtype
    if config.learner.lora is not None and config.weights.adapters == "only":
        raise ConfigError(
            f"weights.adapters=only with weights.dtype={dtype}: engines would keep the weights of model.path, which have "
            "another form; set weights.adapters=merged, or weights.dtype=auto"
        )
    algorithm = config.sampler.speculative_algorithm
    if algorithm not in (None, "NGRAM"):
        raise ConfigError(
            f"sampler.sglang.speculative_algorithm={algorithm} with weights.dtype={dtype}: the draft's weights are not sent, "
            "and engines do not load those of model.path, which have another form; set speculative_algorithm=NGRAM"
        )


def _check_blocks(config: Config, form: EngineFloat8, specs: Sequence[TensorSpec], kv_heads: int) -> None:
    """Check that each part of a matrix that SGLang divides or joins consists of whole blocks."""
    tensor = config.sampler.tensor_ranks
    expert_ranks = int(str(config.sampler.sglang_option("ep_size", config.sampler.sglang_option("ep", 1))))
    for spec in specs:
        module = spec.name.removesuffix(".weight").rpartition(".")[2]
        if not form.is_quantized(spec.name, spec.shape):
            continue
        ranks = max(1, tensor // expert_ranks) if ".experts." in spec.name else tensor
        if module in ("k_proj", "v_proj") and kv_heads:
            ranks = min(ranks, kv_heads)
        faults: Mapping[str, bool] = {
            "rows": module in _BY_COLUMNS
            and (ranks > 1 or module in _MERGED)
            and bool(spec.shape[0] % (ranks * form.block[0])),
            "columns": module in _BY_ROWS and ranks > 1 and bool(spec.shape[1] % (ranks * form.block[1])),
        }
        for dimension, is_fault in faults.items():
            if is_fault:
                size, block = (spec.shape[0], form.block[0]) if dimension == "rows" else (spec.shape[1], form.block[1])
                raise ConfigError(
                    f"weights.dtype={config.weights.dtype} with sampler.sglang.tp_size={tensor}: {spec.name} has {size} "
                    f"{dimension}, which {ranks} ranks cannot divide into blocks of {block}; set weights.dtype=bfloat16, or "
                    "a smaller tp_size"
                )


def _layer(name: str) -> int:
    """Return the decoder layer of a weight; -1 for others. Layers for multi-token prediction follow the model's."""
    _, separator, name_in_layers = name.partition(".layers.")
    number = name_in_layers.partition(".")[0]
    return int(number) if separator and number.isdecimal() else -1
