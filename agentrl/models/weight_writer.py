"""Writing of safetensors files part by part: several processes write their parts of the weights into the same files."""

from __future__ import annotations

import itertools
import json
import math
import operator
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.core.atomic_files import names_file
from agentrl.distributed.base import TensorSpec
from agentrl.models.weight_files import DTYPES, INDEX, SINGLE, WeightFiles

if TYPE_CHECKING:
    import torch


FILE_BYTES = 4 << 30
"""Weights of a file; a larger weight gets a separate file."""


@dataclass(frozen=True, slots=True)
class _Location:
    file: str
    begin: int
    """Bytes before the weight in its file."""


class WeightWriter:
    """Writes weights into a folder as safetensors files with an index, as transformers does.

    Every process that writes has the same ``specs``. One of them calls `create` before any calls `write`.

    Args:
        folder: exists.
        specs: names, dtypes and shapes of all weights.
        file_bytes: of weights in a file.
        single: name of the file, if there is one.
    """

    def __init__(
        self, folder: Path, specs: Sequence[TensorSpec], file_bytes: int = FILE_BYTES, *, single: str = SINGLE
    ) -> None:
        self._folder = folder
        files = _divide(specs, file_bytes)
        names = [f"model-{at + 1:05d}-of-{len(files):05d}.safetensors" for at in range(len(files))]
        self._files = dict(zip(names if len(files) > 1 else [single], files, strict=True))
        self._headers = {name: _header(file) for name, file in self._files.items()}
        self._shapes = {spec.name: tuple(spec.shape) for spec in specs}
        self._locations: dict[str, _Location] = {}
        for name, file in self._files.items():
            begin = len(self._headers[name])
            for spec in file:
                self._locations[spec.name] = _Location(name, begin)
                begin += _size(spec)

    def create(self) -> None:
        """Write the files' headers and the index. The files have their full size then."""
        for name, header in self._headers.items():
            path = self._folder / name
            with names_file(path), path.open("wb") as file:
                file.write(header)
                file.truncate(len(header) + sum(map(_size, self._files[name])))
        if len(self._files) > 1:
            index = {
                "metadata": {"total_size": sum(_size(spec) for file in self._files.values() for spec in file)},
                "weight_map": {name: location.file for name, location in sorted(self._locations.items())},
            }
            with names_file(self._folder / INDEX):
                (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def write(self, name: str, weight: torch.Tensor) -> None:
        """Write a whole weight, from the CPU."""
        self.write_part(name, weight, (0,) * weight.ndim)

    def write_part(self, name: str, values: torch.Tensor, offsets: Sequence[int]) -> None:
        """Write a part of a weight, from the index ``offsets`` on, from the CPU; adjacent numbers with one system call."""
        import torch

        location, shape = self._locations[name], self._shapes[name]
        data = values.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        if not data:
            return
        adjacent = values.ndim  # dimensions up to this one are divided into calls
        while adjacent and values.shape[adjacent - 1 :] == shape[adjacent - 1 :]:
            adjacent -= 1
        adjacent = max(adjacent - 1, 0)
        strides = [math.prod(shape[dimension + 1 :]) * values.element_size() for dimension in range(values.ndim)]
        begin = location.begin + sum(map(operator.mul, offsets, strides))
        size = math.prod(values.shape[adjacent:]) * values.element_size()
        path = self._folder / location.file
        handle = os.open(path, os.O_WRONLY)
        try:
            with names_file(path):
                for number, index in enumerate(itertools.product(*map(range, values.shape[:adjacent]))):
                    at = begin + sum(map(operator.mul, index, strides))
                    _write_at(handle, data[number * size : (number + 1) * size], at)
        finally:
            os.close(handle)


def _write_at(handle: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(handle, data, at)
        data, at = data[written:], at + written


def _divide(specs: Sequence[TensorSpec], file_bytes: int) -> list[list[TensorSpec]]:
    files: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if files[-1] and size + _size(spec) > file_bytes:
            files.append([])
            size = 0
        files[-1].append(spec)
        size += _size(spec)
    return files


def _size(spec: TensorSpec) -> int:
    import torch

    dtype: torch.dtype = getattr(torch, spec.dtype)
    return math.prod(spec.shape) * dtype.itemsize


def _header(specs: Sequence[TensorSpec]) -> bytes:
    """Return the length of the description, and the description, padded to 8 bytes."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for spec in specs:
        end = begin + _size(spec)
        described[spec.name] = {"dtype": DTYPES[spec.dtype], "shape": spec.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


DRAFTS = "draft_layers"
"""Folder of the layers next to a distributed checkpoint."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class DraftLayers:
    """The weights of the layers that follow those of the model.

    Args:
        folder: of a model, or of what `save` wrote.
        layers: of the model, without these.
        key: configuration key of the folder, for messages.

    Raises:
        ModelError: a file is damaged.
    """

    def __init__(self, folder: Path, layers: int, key: str) -> None:
        self._files = WeightFiles(folder, key)
        matches = ((_LAYER.match(spec.name), spec) for spec in self._files.specs())
        self.specs = [spec for match, spec in matches if match is not None and int(match[1]) >= layers]

    def write(self, writer: WeightWriter) -> None:
        """Write the weights, which are among those of ``writer``."""
        for spec in self.specs:
            writer.write(spec.name, self._files.read(spec.name, ()))

    def save(self, out: Path) -> None:
        """Write the weights into the folder `DRAFTS` in ``out``; none if there are none."""
        if self.specs:
            (out / DRAFTS).mkdir()
            writer = WeightWriter(out / DRAFTS, self.specs)
            writer.create()
            self.write(writer)
