"""Float8 weights as SGLang's engines take them at a weight sync: blocks of a matrix with one scale each.

SGLang 0.5.23 takes new float8 weights only in this form. After a load of weights with one scale a weight, a row or
a shard, and after it has quantised weights itself (``--quantization fp8``), it drops what loads them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.core.errors import ConfigError, ModelError
from agentrl.distributed.base import TensorSpec
from agentrl.models.float8 import read_quantization

if TYPE_CHECKING:
    import torch

DTYPE = "float8_e4m3fn"
"""Name of the dtype in torch."""
SCALE = "_scale_inv"
"""Ending of the name of a weight's scales, which the weight is multiplied by."""
KEPT_KEY = "agentrl_engine_quantization"
"""In ``config.json`` of weights that are no longer quantised: the ``quantization_config`` of the folder they came from, so that
a resumed run has the same engines."""
QUANTIZATION: Mapping[str, object] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
"""``quantization_config`` of engines of a model that is not published in float8."""
FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "glm4", "glm4_moe", "deepseek_v3", "kimi_k2")
"""``model_type`` of models of which SGLang 0.5.23 has exactly the weights in float8 that `EngineFloat8.is_quantized` names, and
loads their scales. Its loader of Llama and Mistral drops scales of blocks with no more than a warning."""
_MAX = 448.0
"""The largest number of float8_e4m3fn."""
_SMALLEST, _SMALLEST_POWER = 1e-12, 1e-4
"""Smallest magnitude of a block: SGLang's for scales in float32, and for powers of two."""
_CHUNK = 16 << 20
"""Numbers of a weight that are quantised together; in float32 they take 64 MiB."""
_INDEXER = (".indexer.wq_b.weight", ".indexer.wk.weight")
_NOT_INDEXER = ".indexer.weights_proj.weight"


@dataclass(frozen=True, slots=True)
class EngineFloat8:
    """Which weights of a model engines have in float8, and with which scales."""

    block: tuple[int, int]
    """Rows and columns with one scale."""
    powers_of_two: bool
    """Whether scales are powers of two (``scale_fmt: ue8m0``)."""
    unconverted: tuple[str, ...]
    """Modules that are not quantised: ``modules_to_not_convert``."""

    @classmethod
    def parse(cls, quantization: Mapping[str, object], where: str) -> EngineFloat8:
        """Return the form of a ``quantization_config``.

        Args:
            quantization: with ``quant_method: fp8`` and ``weight_block_size``.
            where: of it, for messages.

        Raises:
            ConfigError: engines take no new weights in this form.
        """
        entry = quantization.get("weight_block_size")
        block = [int(size) for size in entry] if isinstance(entry, list | tuple) else []
        method, scheme = quantization.get("quant_method"), quantization.get("activation_scheme", "dynamic")
        if method != "fp8" or len(block) != 2 or scheme != "dynamic":
            raise ConfigError(
                f"{where}: quantization_config has quant_method={method!r}, weight_block_size={block or None}, "
                f"activation_scheme={scheme!r}, and SGLang takes new float8 weights only with fp8, blocks and dynamic: write a "
                "copy with agentrl export FOLDER OUT, set model.path=OUT, and weights.dtype=float8 for engines in float8"
            )
        skipped = quantization.get("modules_to_not_convert") or quantization.get("ignored_layers")
        modules = tuple(map(str, skipped)) if isinstance(skipped, list) else ()
        return cls((block[0], block[1]), quantization.get("scale_fmt") == "ue8m0", modules)

    def is_quantized(self, name: str, shape: Collection[int]) -> bool:
        """Return whether engines have a weight in float8: a matrix of a decoder layer's attention, MLP or experts."""
        if len(shape) != 2 or ".layers." not in name or name.endswith(_NOT_INDEXER):
            return False
        return name.endswith(("_proj.weight", *_INDEXER, ".kv_a_proj_with_mqa.weight")) and not self._is_skipped(name)

    def _is_skipped(self, name: str) -> bool:
        module = f".{name.removesuffix('.weight')}."
        return any(f".{skipped.strip('.').removeprefix('model.')}." in module for skipped in self.unconverted)

    def sent_specs(self, spec: TensorSpec) -> list[TensorSpec]:
        """Return the tensors that are sent for a weight: itself, or float8 and the scales of its blocks in float32."""
        if not self.is_quantized(spec.name, spec.shape):
            return [spec]
        counts = tuple(-(-size // block) for size, block in zip(spec.shape, self.block, strict=True))
        return [TensorSpec(spec.name, DTYPE, spec.shape), TensorSpec(spec.name + SCALE, "float32", counts)]

    def quantize(self, weight: torch.Tensor, into: torch.Tensor, scales: torch.Tensor) -> None:
        """Write a matrix in float8, and the scales of its blocks.

        The scale of a block is its largest magnitude over 448, or the power of two above. The numbers are divided by it and
        rounded to the nearest.

        Args:
            weight: ``[R, C]``, floating point.
            into: ``[R, C]`` float8_e4m3fn.
            scales: float32, one for each block, the last ones of which may be smaller.
        """
        import torch
        from torch.nn.functional import pad

        rows, columns = self.block
        width = -(-weight.shape[1] // columns) * columns
        blocks_at_once = max(1, _CHUNK // (rows * width))
        for first in range(0, len(scales), blocks_at_once):
            lines = slice(first * rows, min((first + blocks_at_once) * rows, len(weight)))
            numbers = weight[lines].float()
            padded = pad(numbers, (0, width - weight.shape[1], 0, -len(numbers) % rows))
            blocks = padded.view(-1, rows, width // columns, columns)
            largest = blocks.abs().amax(dim=(1, 3), keepdim=True)
            if self.powers_of_two:
                scale = _power_above(largest.clamp(min=_SMALLEST_POWER) / _MAX)
            else:
                scale = largest.clamp(min=_SMALLEST) / _MAX
            quantized = (blocks / scale).clamp(-_MAX, _MAX).to(torch.float8_e4m3fn).view(padded.shape)
            into[lines] = quantized[: len(numbers), : weight.shape[1]]
            scales[first : first + blocks_at_once] = scale[:, 0, :, 0]


def _power_above(numbers: torch.Tensor) -> torch.Tensor:
    """Return the smallest power of two that is not less, exactly."""
    import torch

    mantissa, exponent = torch.frexp(numbers)  # a number is its mantissa, from 0.5 on and below 1, times 2 ** exponent
    return torch.ldexp(torch.ones_like(numbers), exponent - (mantissa == 0.5).int())


def keeps_blocks(quantization: Mapping[str, object]) -> bool:
    """Return whether engines take new weights in the form of a ``quantization_config``."""
    return quantization.get("quant_method") == "fp8" and bool(quantization.get("weight_block_size"))


def own_quantization(folder: Path) -> Mapping[str, object] | None:
    """Return the ``quantization_config`` of a folder, or of that its weights came from; None without one.

    Raises:
        ModelError: ``config.json`` cannot be read.
    """
    original = _config(folder).get(KEPT_KEY)
    return read_quantization(folder) or (original if isinstance(original, dict) else None)


def engine_overrides(dtype: str, folder: Path) -> dict[str, object] | None:
    """Return what SGLang is to read in place of entries of a folder's ``config.json``; None: nothing.

    With it engines start with random weights: those of the folder have another form.

    Args:
        dtype: ``weights.dtype``.
        folder: that the engines start from.

    Raises:
        ConfigError: see `read_engine_float8`.
        ModelError: ``config.json`` cannot be read.
    """
    quantization, published = own_quantization(folder), read_quantization(folder)
    if dtype not in ("auto", "float8"):
        return {"quantization_config": None} if published else None
    if published or (quantization is None and dtype == "auto"):
        return None
    read_engine_float8(folder)
    return {"quantization_config": dict(quantization or QUANTIZATION)}


def has_float8_engines(dtype: str, folder: Path) -> bool:
    """Return whether engines of a run have the model in a folder in float8; ``dtype`` is ``weights.dtype``."""
    return dtype == "float8" or (dtype == "auto" and own_quantization(folder) is not None)


def read_engine_float8(folder: Path, key: str = "model.path") -> EngineFloat8:
    """Return how engines have the model in a folder in float8: as it is published, else `QUANTIZATION`.

    Raises:
        ConfigError: engines take no new weights in the form of the folder, or none of this family.
        ModelError: ``config.json`` cannot be read.
    """
    kind = _config(folder).get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(
            f"weights.dtype=float8: {folder} is a model with model_type={kind!r}, and that SGLang loads new float8 weights was "
            f"tested of {', '.join(FAMILIES)} only; set weights.dtype=bfloat16"
        )
    return EngineFloat8.parse(own_quantization(folder) or QUANTIZATION, f"{key}={folder}")


def check_published(
    form: EngineFloat8, specs: Collection[TensorSpec], float8_names: Collection[str], where: str
) -> None:
    """Check that a folder has in float8 what its engines are sent in float8.

    Args:
        form: of the folder.
        specs: its weights.
        float8_names: those that are float8.
        where: the key and the folder, for messages.

    Raises:
        ConfigError: a weight is float8 on one side only.
    """
    names = set(float8_names)
    for spec in specs:
        if (spec.name in names) != form.is_quantized(spec.name, spec.shape):
            is_float8, is_sent = ("float8", "bfloat16") if spec.name in names else ("bfloat16", "float8")
            raise ConfigError(
                f"{where}: {spec.name} is {is_float8} in the folder, and would be sent to engines as {is_sent}: set "
                "weights.dtype=bfloat16"
            )


def _config(folder: Path) -> dict[str, object]:
    path = folder / "config.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{path} cannot be read: {error!r}") from error
