"""Weights in the safetensors files of a Hugging Face folder, read slice by slice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import ModelError
from agentrl.distributed.base import TensorSpec

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""Names of dtypes in safetensors, by those of torch."""


class WeightFiles:
    """The weights of a folder by name. Files are mapped into memory, not read as a whole.

    Args:
        folder: with ``model.safetensors``, or several files and their index. A folder without them has no weights.
        key: configuration key of the folder, for messages.

    Raises:
        ModelError: a file is missing or damaged.
    """

    def __init__(self, folder: Path, key: str) -> None:
        from safetensors import SafetensorError, safe_open

        self._opened: dict[str, Any] = {}
        """Files by weight."""
        try:
            for path in _weight_files(folder):
                opened: Any = safe_open(path, "pt")
                self._opened |= dict.fromkeys(opened.keys(), opened)
        except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{key}={folder}: its weights cannot be read: {error!r}") from error

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of all weights by name."""
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._opened.items()}

    def specs(self) -> list[TensorSpec]:
        """Return names, dtypes and shapes of all weights, by name."""
        names = {safetensors_name: name for name, safetensors_name in DTYPES.items()}
        shapes = self.shapes()
        return [
            TensorSpec(name, names[self._opened[name].get_slice(name).get_dtype()], shapes[name])
            for name in sorted(shapes)
        ]

    def read(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """Return a part of a weight, in the file's dtype, on the CPU. Nothing else of the weight is read."""
        file = self._opened[name]
        tensor: torch.Tensor = file.get_slice(name)[slices] if slices else file.get_tensor(name)
        return tensor


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return [folder / name for name in sorted(set(index["weight_map"].values()))]
    return [folder / SINGLE] if (folder / SINGLE).is_file() else []
