"""Export of a checkpoint's model to a Hugging Face folder, weight by weight."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.core.errors import ConfigError, ModelError
from agentrl.models.engine_float8 import KEPT_KEY
from agentrl.models.load import as_dtype
from agentrl.models.peft_folder import layer_names, read_peft
from agentrl.models.sharded_weights import POLICIES, Weights, is_sharded, sharded_weights
from agentrl.models.weight_files import FLOATS, INDEX, WeightFiles, float32_weights, is_always_float32
from agentrl.models.weight_writer import FILE_BYTES, WeightWriter

if TYPE_CHECKING:
    import torch

_PREFIX = "base_model.model."
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
"""Files of a model folder other than weights: configuration, tokenizer and chat template."""


def copy_other_files(source: Path, out: Path, without: str = "") -> None:
    """Copy what a model folder has besides weights, ``config.json`` and ``without``: the tokenizer's files, template, code."""
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.name not in (INDEX, "config.json", without):
                shutil.copyfile(file, out / file.name)


def check_free(out: Path, key: str = "") -> None:
    """Refuse a folder that holds files or cannot be made; ``key`` is what it was given as.

    Raises:
        ConfigError: it does, or it or a folder above it is a file.
    """
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"{key}{out} holds files; name a new folder")
    if file := next((path for path in (out, *out.parents) if path.exists() and not path.is_dir()), None):
        raise ConfigError(f"{key}{out}: {file} is a file; name a new folder")


class _Adapters:
    """The adapters of a PEFT folder, to be merged into the weights of their base model."""

    def __init__(self, folder: Path) -> None:
        config, tensors = read_peft(folder)
        self._scale = config["lora_alpha"] / config["r"]
        self._tensors = dict(tensors)
        self.weights = {f"{layer.removeprefix(_PREFIX)}.weight" for layer in layer_names(self._tensors)}
        """Names of the weights that have one."""

    def merge(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight of the base model, if it has an adapter ``W + alpha / r B A`` in float32."""
        if name not in self.weights:
            return weight
        layer = f"{_PREFIX}{name.removesuffix('.weight')}"
        a, b = (self._tensors[f"{layer}.lora_{matrix}.weight"].float() for matrix in "AB")
        merged_weight: torch.Tensor = weight.float() + self._scale * (b @ a)
        return merged_weight


def export_model(
    source: Path, out: Path, dtype: str, file_bytes: int = FILE_BYTES, adapters: Path | None = None
) -> None:
    """Write the model in ``source`` to ``out``, with its tokenizer. One weight at a time is in memory.

    Args:
        source: a Hugging Face folder with safetensors files, or ``model/`` of a checkpoint without them; see `sharded_weights`.
        out: does not exist, or is empty.
        dtype: of the written weights; integers and `float32_weights` keep theirs.
        file_bytes: of weights in a file.
        adapters: a PEFT folder, which is merged into the weights.

    Raises:
        ConfigError: ``out`` holds files.
        CheckpointError: sharded weights are damaged.
        ModelError: the folder has no weights, or they cannot be read; no such dtype; the adapters are of another model.
    """
    as_dtype(dtype)
    check_free(out)
    files: Sequence[Weights] = [WeightFiles(source, "export")]
    unchanged = float32_weights(files[0].specs())
    if is_sharded(source):
        files, adapters = sharded_weights(source.parent), adapters or _only_adapters(source.parent)
    weights = {spec.name: folder for folder in files for spec in folder.specs()}
    specs = [spec for folder in files for spec in folder.specs()]
    if is_sharded(source):  # weights that are trained are float32, whatever the model was
        unchanged = frozenset(filter(is_always_float32, weights))
    specs = [
        replace(spec, dtype=dtype) if spec.dtype in FLOATS and spec.name not in unchanged else spec for spec in specs
    ]
    if not specs:
        raise ConfigError(f"{source} holds no safetensors files")
    adapters_to_merge = None if adapters is None else _Adapters(adapters)
    if adapters_to_merge is not None and (
        unknown_weights := sorted(adapters_to_merge.weights - {spec.name for spec in specs})
    ):
        raise ModelError(f"{adapters} has adapters of {unknown_weights[0]}, which {source} has not")
    out.mkdir(parents=True, exist_ok=True)
    writer = WeightWriter(out, specs, file_bytes)
    writer.create()
    for spec in specs:
        weight = weights[spec.name].read(spec.name, ())
        weight = weight if adapters_to_merge is None else adapters_to_merge.merge(spec.name, weight)
        writer.write(spec.name, weight.to(as_dtype(spec.dtype)))
    copy_other_files(source, out)
    write_config(source, out, dtype)


def _only_adapters(checkpoint: Path) -> Path | None:
    """Return the adapters of a checkpoint of one policy; None without LoRA."""
    folders = [path for path in (checkpoint / POLICIES).glob("*") if path.is_dir()]
    return folders[0] if len(folders) == 1 else None


def write_config(source: Path, out: Path, dtype: str) -> None:
    """Write the ``config.json`` of a model whose weights in ``out`` have another dtype and are not quantised."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for section in (config, config.get("text_config") or {}):
        section.pop("quantization_config", None)
        section.pop(KEPT_KEY, None)
    (out / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n", encoding="utf-8")
