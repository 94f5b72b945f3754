"""Export of a checkpoint's model to a Hugging Face folder, weight by weight."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from agentrl.core.errors import ConfigError
from agentrl.models.load import as_dtype
from agentrl.models.weight_files import INDEX, WeightFiles
from agentrl.models.weight_writer import FILE_BYTES, WeightWriter

_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
"""Files of a model folder other than weights: configuration, tokenizer and chat template."""


def copy_other_files(source: Path, out: Path, without: str = "") -> None:
    """Copy what a model folder has besides weights, ``config.json`` and ``without``: the tokenizer's files, template, code."""
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.name not in (INDEX, "config.json", without):
                shutil.copyfile(file, out / file.name)


def check_free(out: Path, key: str = "") -> None:
    """Refuse a folder that holds files; ``key`` is what it was given as.

    Raises:
        ConfigError: it does.

    """
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"{key}{out} holds files; name a new folder")


def export_model(source: Path, out: Path, dtype: str, file_bytes: int = FILE_BYTES) -> None:
    """Write the model in ``source`` to ``out``, with its tokenizer. One weight at a time is in memory.

    Args:
        source: a Hugging Face folder with safetensors files.
        out: does not exist, or is empty.
        dtype: of the written weights; integers keep theirs.
        file_bytes: of weights in a file.

    Raises:
        ConfigError: ``out`` holds files.
        ModelError: the folder has no weights, or they cannot be read; no such dtype.

    """
    as_dtype(dtype)
    check_free(out)
    files = WeightFiles(source, "export")
    specs = [replace(spec, dtype=dtype) if "float" in spec.dtype else spec for spec in files.specs()]
    if not specs:
        raise ConfigError(f"{source} holds no safetensors files")
    out.mkdir(parents=True, exist_ok=True)
    writer = WeightWriter(out, specs, file_bytes)
    writer.create()
    for spec in specs:
        writer.write(spec.name, files.read(spec.name, ()).to(as_dtype(spec.dtype)))
    copy_other_files(source, out)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (out / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n", encoding="utf-8")
