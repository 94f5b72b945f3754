"""Resolution of ``model.path`` to a local Hugging Face folder."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tempfile
import zlib
from pathlib import Path

from agentrl.config.recorded import CONTENT
from agentrl.core.checksums import sampled_checksum
from agentrl.core.errors import MissingError, ModelError
from agentrl.core.reading import reading
from agentrl.core.registry import MODELS, model_folder, names

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
PACKAGED = ("smollm2-135m",)
"""Models extracted from a Python package to ``models/NAME`` in the working directory."""
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


def resolve_model(path: str, key: str = "model.path", *, fetch: bool = True) -> Path:
    """Return the Hugging Face folder of ``path``: a local folder, a registered or packaged name, or a hub id, in this order.

    Without ``fetch`` only the local cache of the hub is used, and no model is extracted from a package.

    Raises:
        MissingError: ``fetch`` is False and the model is neither in the cache nor in ``models/``.
        ModelError: no such model; the message names ``key``, the configuration key of ``path``.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return _require_config(folder.resolve(), path, key)
    if folder.is_file():
        raise ModelError(f"{key}={path}: it is a file; set {key} to the Hugging Face folder of the model")
    registered = model_folder(path)
    if registered is not None:
        return _require_config(registered, path, key)
    if path in PACKAGED:
        return _require_config(_from_package(path, key, fetch=fetch), path, key)
    if not _HUB_ID.fullmatch(path):
        raise ModelError(f"{key}={path}: there is no such folder. Registered models: {_model_names()}")
    return _require_config(_from_hub(path, key) if fetch else _from_cache(path, key), path, key)


def model_contents(folder: Path) -> dict[str, str]:
    """Return checksums of the files of a model's folder, of its weights together, by ``content of model.path (FILE)``."""
    files = sorted({file for pattern in (*_FILES, "*.py") for file in folder.glob(pattern)})
    contents = {file.name: sampled_checksum(file) for file in files}
    weights = [f"{name} {contents.pop(name)}" for name in [*contents] if name.endswith(".safetensors")]
    contents["weights"] = f"{len(weights)} files, crc32 {zlib.crc32('; '.join(weights).encode()):08x}"
    return {f"{CONTENT}model.path ({name})": text for name, text in contents.items()}


def has_chat_template(folder: Path) -> bool:
    """Return whether the tokenizer in a Hugging Face folder has a chat template.

    Raises:
        ModelError: its ``tokenizer_config.json`` cannot be read.
    """
    if any((folder / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return False
    with reading(f"model.path={folder}: {path.name}", "configuration of a tokenizer in JSON", ModelError):
        return bool(json.loads(path.read_bytes()).get("chat_template"))


def _require_config(folder: Path, path: str, key: str) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{key}={path}: {folder} has no config.json, so it is not a Hugging Face model folder")
    return folder


def _from_package(name: str, key: str, *, fetch: bool) -> Path:
    folder = Path("models", name).resolve()
    if not folder.is_dir() and not fetch:
        raise MissingError(f"{key}={name}: not in {folder} yet; a run would extract it from its package")
    if not folder.is_dir():
        get_packaged(name, folder)
    return folder


def get_packaged(name: str, folder: Path) -> None:
    """Extract one of `PACKAGED` to a Hugging Face folder, atomically.

    Raises:
        ModelError: its package is not installed; the message has the command that installs it.
    """
    from agentrl.models.smollm2 import get_smollm2  # imports torch

    assert name in PACKAGED
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as temporary:
        written = Path(temporary) / name
        with contextlib.redirect_stderr(io.StringIO()):  # three progress bars of transformers, for five seconds
            get_smollm2(written)
        try:
            written.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process has written it meanwhile
                raise


def _from_hub(path: str, key: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=list(_FILES)))
    except Exception as error:  # the hub client raises its own errors, those of requests and httpx, and OSError
        offline = os.environ.get("HF_HUB_OFFLINE", "")
        why = f" (HF_HUB_OFFLINE={offline}: the hub is not contacted)" if offline not in ("", "0") else ""
        raise ModelError(
            f"{key}={path}: no folder and no registered model ({_model_names()}), and the Hugging Face hub gave nothing"
            f"{why}: {type(error).__name__}: {error}. Set {key} to a folder with the model."
        ) from error


def _from_cache(path: str, key: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=list(_FILES), local_files_only=True))
    except LocalEntryNotFoundError:
        raise MissingError(f"{key}={path}: not in the cache of the Hugging Face hub; a run would download it") from None
    except (HfHubHTTPError, ValueError) as error:
        raise ModelError(f"{key}={path}: {error}") from error


def _model_names() -> str:
    return ", ".join((*names(MODELS), *PACKAGED))
