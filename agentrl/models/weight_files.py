"""Weights in the safetensors files of a Hugging Face folder, read slice by slice."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import ModelError
from agentrl.distributed.base import TensorSpec
from agentrl.models.float8 import Scales

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""Names of dtypes in safetensors, by those of torch."""
FLOATS = ("float64", "float32", "float16", "bfloat16")
_FLOAT32_WEIGHTS = ("e_score_correction_bias", "expert_bias", "router_bias", "A_log", "dt_bias")
"""Last part of the names of biases of routers and parameters of state-space layers."""


class WeightFiles:
    """The weights of a folder by name. Files are mapped into memory, not read as a whole.

    Float8 weights are read in bfloat16, multiplied by their scales; see `Scales`.

    Args:
        folder: with ``model.safetensors``, or several files and their index. A folder without them has no weights.
        key: configuration key of the folder, for messages.

    Raises:
        ModelError: a file is missing or damaged, or weights have a dtype that agentrl does not read.
    """

    def __init__(self, folder: Path, key: str) -> None:
        from safetensors import SafetensorError, safe_open

        opened_files: dict[str, Any] = {}
        """Files by tensor."""
        try:
            for path in _weight_files(folder):
                opened: Any = safe_open(path, "pt")
                opened_files |= dict.fromkeys(opened.keys(), opened)
        except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{key}={folder}: its weights cannot be read: {error!r}") from error
        slices = {name: file.get_slice(name) for name, file in opened_files.items()}
        self._scales = Scales(folder, {name: tensor.get_dtype() for name, tensor in slices.items()}, key)
        self._opened = opened_files
        names = {safetensors_name: name for name, safetensors_name in DTYPES.items()}
        self._specs: dict[str, TensorSpec] = {}
        for name in sorted(slices.keys() - self._scales.hidden):
            dtype = "bfloat16" if name in self._scales.names else names.get(slices[name].get_dtype())
            if dtype is None:
                raise ModelError(
                    f"{key}={folder}: {name} is {slices[name].get_dtype()}, a dtype that agentrl does not read"
                )
            self._specs[name] = TensorSpec(name, dtype, tuple(slices[name].get_shape()))
        self._where = f"{key}={folder}"

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of all weights by name."""
        return {name: spec.shape for name, spec in self._specs.items()}

    def specs(self) -> list[TensorSpec]:
        """Return names, dtypes and shapes of all weights, by name."""
        return [*self._specs.values()]

    @property
    def float8_names(self) -> Collection[str]:
        """Names of the weights that are float8 in the files."""
        return self._scales.names.keys()

    def check_floats(self, name: str) -> None:
        """Check that a weight is a floating-point number.

        Raises:
            ModelError: it is an integer, such as those of a quantised weight.
        """
        if (dtype := self._specs[name].dtype) not in FLOATS:
            raise ModelError(f"{self._where}: {name} is {dtype}, and the model's is a floating-point number")

    def read(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """Return a part of a weight, in the dtype of `specs`, on the CPU. Nothing else of the weight is read."""
        file = self._opened[name]
        tensor: torch.Tensor = file.get_slice(name)[slices] if slices else file.get_tensor(name)
        scale_name = self._scales.names.get(name)
        if scale_name is None:
            return tensor
        scale = self._opened[scale_name].get_tensor(scale_name)
        return self._scales.dequantize(name, tensor, slices, self._specs[name].shape, scale)


def is_always_float32(name: str) -> bool:
    """Return whether engines have a weight in float32 whatever the dtype of the model."""
    return name.rpartition(".")[2] in _FLOAT32_WEIGHTS


def float32_weights(specs: list[TensorSpec]) -> frozenset[str]:
    """Return the names of weights that stay in float32 when the others are cast to a smaller dtype.

    They are those that a model of mostly smaller numbers has in float32, and those of `is_always_float32`.
    """
    sizes: Counter[str] = Counter()
    for spec in specs:
        sizes[spec.dtype] += math.prod(spec.shape)
    is_smaller = bool(sizes) and sizes.most_common(1)[0][0] != "float32"
    return frozenset(
        spec.name for spec in specs if is_always_float32(spec.name) or (is_smaller and spec.dtype == "float32")
    )


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return [folder / name for name in sorted(set(index["weight_map"].values()))]
    return [folder / SINGLE] if (folder / SINGLE).is_file() else []
