"""Float8 weights of Hugging Face folders: which tensors are their scales, and what they are in bfloat16."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import ModelError

if TYPE_CHECKING:
    import torch

FLOAT8 = ("F8_E4M3", "F8_E5M2")
"""Names in safetensors."""
_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors")
_SCALES = ("_scale_inv", "_scale")
"""Endings of the names of scales; a weight is its float8 numbers times its scale."""
_NO_WEIGHTS = ("input_scale", "input_scale_ub", "activation_scale", "output_scale", "k_scale", "v_scale")
"""Last part of the names of scales of activations, which engines use."""


class Scales:
    """The scales of a folder's float8 weights: one a weight, row, column or block.

    Args:
        folder: of the model.
        dtypes: by name, those of safetensors.
        key: configuration key of the folder, for messages.

    Raises:
        ModelError: weights are quantised in another way, or a float8 weight has no scale.
    """

    def __init__(self, folder: Path, dtypes: Mapping[str, str], key: str) -> None:
        self._where = f"{key}={folder}"
        self._block = _block_size(folder, self._where)
        self.names = {name: self._find(name, dtypes) for name, dtype in dtypes.items() if dtype in FLOAT8}
        """Names of scales by weight."""
        scale_names = {*self.names.values()}
        self.hidden = {name for name in dtypes if name in scale_names or name.rpartition(".")[2] in _NO_WEIGHTS}
        """Names in the files that are no weights of the model."""

    def _find(self, name: str, dtypes: Mapping[str, str]) -> str:
        for ending in _SCALES:
            if name + ending in dtypes:
                return name + ending
        raise ModelError(
            f"{self._where}: {name} is float8 and has no scale ({' or '.join(name + ending for ending in _SCALES)}); set a "
            "folder with the weights in bfloat16"
        )

    def dequantize(
        self, name: str, rows: torch.Tensor, slices: tuple[slice, ...], shape: tuple[int, ...], scale: torch.Tensor
    ) -> torch.Tensor:
        """Return a part of a weight in bfloat16.

        Args:
            name: of the weight.
            rows: the part, in float8.
            slices: of the weight that are the part; empty for all of it.
            shape: of the weight.
            scale: all of it.

        Raises:
            ModelError: the scale fits no rows, columns or blocks of the weight.
        """
        import torch

        scale = scale.float()
        if scale.numel() == 1:
            scale = scale.reshape((1,) * len(shape))
        elif scale.ndim == len(shape) - 1:
            scale = scale.unsqueeze(-1)  # of rows
        if scale.ndim != len(shape):
            raise self._not_fitting(name, shape, scale)
        slices = slices or tuple(map(slice, shape))
        for dim, (dim_slice, size) in enumerate(zip(slices, shape, strict=True)):
            block = self._rows_of_scale(name, shape, scale, dim)
            if block < size:
                start, stop, _ = dim_slice.indices(size)
                scale = scale.index_select(dim, torch.arange(start, stop) // block)
        return (rows.float() * scale).bfloat16()

    def _rows_of_scale(self, name: str, shape: tuple[int, ...], scale: torch.Tensor, dim: int) -> int:
        """Return how many consecutive rows of a dimension have a scale."""
        size, count = shape[dim], scale.shape[dim]
        if count in (1, size):
            return size // count
        from_end = dim - len(shape)
        block = self._block[from_end] if -len(self._block) <= from_end else size // count
        if -(-size // block) != count:
            raise self._not_fitting(name, shape, scale)
        return block

    def _not_fitting(self, name: str, shape: tuple[int, ...], scale: torch.Tensor) -> ModelError:
        block = f" in blocks of {list(self._block)} (weight_block_size)" if self._block else ""
        return ModelError(
            f"{self._where}: the scale of {name} has the shape {list(scale.shape)}, which does not fit a weight of "
            f"{list(shape)}{block}"
        )


def is_quantized(folder: Path) -> bool:
    """Return whether the ``config.json`` of a model has a ``quantization_config``."""
    return bool(read_quantization(folder))


def read_quantization(folder: Path) -> dict[str, Any]:
    """Return the ``quantization_config`` in the ``config.json`` of a folder; empty if there is none.

    Raises:
        ModelError: ``config.json`` cannot be read.
    """
    path = folder / "config.json"
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        sections = [fields, fields.get("text_config") or {}]
        return next(
            (dict(section["quantization_config"]) for section in sections if section.get("quantization_config")), {}
        )
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read: {error!r}") from error


def _block_size(folder: Path, where: str) -> tuple[int, ...]:
    """Return the size of a block of the last two dimensions with one scale; empty if there are no blocks.

    Raises:
        ModelError: weights are quantised in another way than float8.
    """
    quantization = read_quantization(folder)
    method = quantization.get("quant_method")
    schemes = [group.get("weights") or {} for group in (quantization.get("config_groups") or {}).values()]
    is_float8 = all(scheme.get("num_bits") == 8 and scheme.get("type") == "float" for scheme in schemes)
    if quantization and (method not in _METHODS or not is_float8):
        kinds = ", ".join(sorted({f"{scheme.get('type')}{scheme.get('num_bits')}" for scheme in schemes}))
        raise ModelError(
            f"{where}: config.json has quantization_config with quant_method={method!r}{f' ({kinds})' if kinds else ''}; "
            f"agentrl reads float8 weights of {', '.join(_METHODS)} only: set a folder with the weights in bfloat16"
        )
    blocks = [quantization.get("weight_block_size"), *(scheme.get("block_structure") for scheme in schemes)]
    return next((tuple(map(int, block)) for block in blocks if block), ())
