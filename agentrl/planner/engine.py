"""GPUs that a plan is made for, and the memory of SGLang's engines: weights and KV cache on each GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.config.sampler import SamplerConfig
from agentrl.core.errors import ConfigError
from agentrl.models.engine_float8 import EngineFloat8

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GIB = 1 << 30
MACHINE = 8
"""GPUs of a machine: tensor-parallel ranks, and the GPUs of an engine, are on one."""
MEMORY_GIB = {"a100": 79.2, "h100": 79.1, "h200": 139.8, "b200": 178.3}
"""GiB of memory that CUDA reports, by name; of the A100 and the H100 those with 80 GB."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of one kind, `MACHINE` to a machine."""

    count: int
    name: str
    bytes: int
    """Memory of one."""

    @classmethod
    def parse(cls, count: int, kind: str) -> Gpus:
        """Return the GPUs of ``--gpus`` and ``--gpu``.

        Args:
            count: 1 or more; above `MACHINE` a multiple of it.
            kind: a name in `MEMORY_GIB`, or a number of GiB.

        Raises:
            ConfigError: the number or the name is none of these.
        """
        if count < 1 or (count > MACHINE and count % MACHINE):
            raise ConfigError(f"--gpus {count}: set it to 1 to {MACHINE}, or to a multiple of {MACHINE}")
        try:
            gib = MEMORY_GIB.get(kind.lower()) or float(kind)
        except ValueError:
            gib = 0.0
        if not 0 < gib < 1e6:
            gpu_names = ", ".join(MEMORY_GIB)
            raise ConfigError(f"--gpu {kind}: no known GPU; set it to {gpu_names}, or to a number of GiB")
        return cls(count, kind.lower(), int(gib * GIB))


ROWS = 16
"""Rows of ``rollout.max_tokens`` that the KV cache of a proposed engine holds at least."""
_FRACTION = {"colocate": 0.8, "disaggregate": 0.85}
"""``mem_fraction_static`` if it is not set; the rest is for activations and CUDA graphs."""
PROCESS_BYTES = 4 * GIB
"""What an engine needs of a GPU besides weights and KV cache: its CUDA context, CUDA graphs and activations."""
_FRACTION_STEP = 0.05
"""Step of ``mem_fraction_static`` of an engine that shares a GPU with the learner."""
_TENSOR_NAMES = ("tp", "tp_size", "tensor_parallel_size")
_CACHE_DTYPES = {"auto": 2, "bfloat16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes of a number by SGLang's ``kv_cache_dtype``."""
_DTYPES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Engines of tensor-parallel GPUs, and the memory of each GPU."""

    engines: int
    tensor: int
    """GPUs of an engine."""
    fraction: float
    """``sampler.sglang.mem_fraction_static``."""
    weights: int
    """Bytes."""
    cache: int
    """Bytes for the KV cache; below 0 if the weights alone do not fit."""
    cache_tokens: int
    """Tokens of an engine's KV cache."""

    def rows(self, tokens: int) -> int:
        """Return how many rows of ``tokens`` the KV cache of an engine holds."""
        return max(0, self.cache_tokens // tokens)

    def line(self, gpus: str) -> str:
        """Return engines and memory in words; ``gpus`` says which GPUs they have."""
        weights, cache = self.weights / GIB, max(0, self.cache) / GIB
        return (
            f"{self.engines} with tp_size={self.tensor}, {gpus}, GiB a GPU: weights {weights:.1f}, KV cache {cache:.1f}: "
            f"{self.cache_tokens:,} tokens in an engine"
        )


@dataclass(frozen=True, slots=True)
class EngineWeights:
    """The weights of an engine's model."""

    numbers: int
    float8_numbers: int = 0
    """How many of them are in float8."""
    scales: int = 0
    """In float32, of blocks of float8 numbers."""

    @classmethod
    def count(cls, model: Any, form: EngineFloat8 | None = None) -> EngineWeights:
        """Count the weights of a model of transformers, of which engines have some in float8 if there is a ``form``."""
        numbers = float8_numbers = scales = 0
        for name, weight in model.named_parameters():
            numbers += weight.numel()
            # Experts are one weight of three dimensions.
            hub_name = name if name.endswith((".weight", ".bias")) else f"{name}.weight"
            hub_name = hub_name.replace(".base_layer.", ".")
            if form is not None and form.is_quantized(hub_name, matrix := tuple(weight.shape[-2:])):
                float8_numbers += weight.numel()
                blocks = math.prod(-(-size // block) for size, block in zip(matrix, form.block, strict=True))
                scales += blocks * (weight.numel() // math.prod(matrix))
        return cls(numbers, float8_numbers, scales)

    def bytes(self, size: int) -> int:
        """Return the bytes of all weights; those that are not float8 have ``size`` bytes each."""
        return size * (self.numbers - self.float8_numbers) + self.float8_numbers + 4 * self.scales


def sets_tensor(sampler: SamplerConfig) -> bool:
    """Return whether the GPUs of an engine are configured, so that a plan keeps them."""
    return any(sampler.sglang_option(name) is not None for name in _TENSOR_NAMES)


def plan_engines(
    hf: Any,
    model_weights: EngineWeights,
    sampler: SamplerConfig,
    *,
    mode: str,
    gpus: int,
    gpu_bytes: int,
    row_tokens: int,
) -> Iterator[EnginePlan]:
    """Yield the engines whose KV cache holds `ROWS` rows, those with the fewest GPUs first; the largest ones if none does.

    Args:
        hf: configuration of the model in transformers.
        model_weights: those of the model.
        sampler: options of SGLang that are set are kept.
        mode: ``placement.mode``.
        gpus: of all engines.
        gpu_bytes: memory of a GPU.
        row_tokens: tokens of the longest row.

    Raises:
        ConfigError: an option of SGLang whose memory is not known here, or an engine larger than a machine.
    """
    fraction_setting, number_bytes, cache_number_bytes = _read_options(sampler, model_weights)
    fraction = fraction_setting or _FRACTION.get(mode, _FRACTION["disaggregate"])
    heads = hf.get_text_config().num_attention_heads
    sizes = [size for size in (1, 2, 4, 8) if gpus % size == 0 and heads % size == 0]
    if sets_tensor(sampler):
        sizes = [sampler.tensor_ranks]
    has_fitting_size = False
    for tensor in sizes:
        weights = math.ceil(model_weights.bytes(number_bytes) / tensor)
        cache = int(fraction * gpu_bytes) - weights
        tokens = max(0, cache) // cache_bytes(hf, tensor, cache_number_bytes)
        plan = EnginePlan(gpus // tensor, tensor, fraction, weights, cache, tokens)
        if plan.rows(row_tokens) >= ROWS or (tensor == sizes[-1] and not has_fitting_size):
            has_fitting_size = True
            yield plan


def plan_engine_beside_learner(
    hf: PretrainedConfig,
    model_weights: EngineWeights,
    sampler: SamplerConfig,
    *,
    gpu_bytes: int,
    row_tokens: int,
    rows: int,
) -> Iterator[EnginePlan]:
    """Yield engines of one GPU that a learner has too, all the time: with a KV cache for ``rows`` rows, then for `ROWS`.

    Args:
        hf: configuration of the model in transformers.
        model_weights: those of the model.
        sampler: options of SGLang that are set are kept.
        gpu_bytes: memory of the GPU.
        row_tokens: tokens of the longest row.
        rows: that are sampled at the same time.

    Raises:
        ConfigError: an option of SGLang whose memory is not known here.
    """
    fraction_setting, number_bytes, cache_number_bytes = _read_options(sampler, model_weights)
    weights, token_bytes = model_weights.bytes(number_bytes), cache_bytes(hf, 1, cache_number_bytes)
    for cached_rows in dict.fromkeys((max(rows, ROWS), ROWS)):
        needed = (weights + cached_rows * row_tokens * token_bytes) / gpu_bytes
        steps = min(math.ceil(needed / _FRACTION_STEP), round(_FRACTION["colocate"] / _FRACTION_STEP))
        fraction = fraction_setting or round(steps * _FRACTION_STEP, 2)
        cache = int(fraction * gpu_bytes) - weights
        yield EnginePlan(1, 1, fraction, weights, cache, max(0, cache) // token_bytes)
        if fraction_setting:
            return


def _read_options(sampler: SamplerConfig, model_weights: EngineWeights) -> tuple[float | None, int, int]:
    """Return ``mem_fraction_static``, if it is set, and the bytes of a number of the weights and of the KV cache.

    Raises:
        ConfigError: the memory of one of them is not known here.
    """
    _check(sampler, is_float8=model_weights.float8_numbers > 0)
    options = {name.replace("-", "_"): value for name, value in sampler.sglang_options.items()}
    dtype = str(options.get("dtype") or "bfloat16")
    if dtype not in _DTYPES:
        raise ConfigError(f"sampler.sglang.dtype={dtype}: its memory is not known; set {', '.join(_DTYPES)}")
    cache_dtype = str(options.get("kv_cache_dtype") or "auto")
    if cache_dtype not in _CACHE_DTYPES:
        raise ConfigError(
            f"sampler.sglang.kv_cache_dtype={cache_dtype}: its memory is not known; set {', '.join(_CACHE_DTYPES)}"
        )
    return options.get("mem_fraction_static"), _DTYPES[dtype], _CACHE_DTYPES[cache_dtype]


def cache_bytes(hf: Any, tensor: int, size: int = 2) -> int:
    """Return the bytes of a token in the KV cache of each of ``tensor`` GPUs.

    With multi-head latent attention each GPU has the whole latent; otherwise heads are divided, and repeated where there are
    fewer than GPUs.

    Args:
        hf: configuration of the model in transformers.
        tensor: GPUs of an engine.
        size: bytes of a number.
    """
    text = hf.get_text_config()
    if getattr(text, "kv_lora_rank", None):
        return int(size * text.num_hidden_layers * (text.kv_lora_rank + text.qk_rope_head_dim))
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(size * text.num_hidden_layers * 2 * math.ceil(text.num_key_value_heads / tensor) * head)


def _check(sampler: SamplerConfig, *, is_float8: bool) -> None:
    if sampler.engine_ranks != sampler.tensor_ranks:
        raise ConfigError(
            f"sampler.sglang: an engine of {sampler.engine_ranks} GPUs with tp_size={sampler.tensor_ranks}; a plan knows tensor "
            "parallelism only: leave out pp_size and dp_size"
        )
    if sampler.tensor_ranks > MACHINE * sampler.engine_machines:
        raise ConfigError(
            f"sampler.sglang.tp_size={sampler.tensor_ranks} on sampler.sglang.nnodes={sampler.engine_machines}: a machine has "
            f"{MACHINE} GPUs; lower tp_size or raise nnodes"
        )
    quantization = sampler.sglang_option("quantization")
    if quantization is not None and not (is_float8 and quantization == "fp8"):
        raise ConfigError(
            f"sampler.sglang.quantization={quantization}: its memory is not known; leave it out to plan, or set "
            "weights.dtype=float8"
        )
