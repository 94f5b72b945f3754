"""From the value of ``model.path`` to a folder on this disk."""

from __future__ import annotations

import os
import re
from pathlib import Path

from huggingface_hub import snapshot_download

from agentrl.errors import ModelError
from agentrl.registry import MODELS, model_folder, names

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


def resolve_model(path: str) -> Path:
    """Return the Hugging Face folder that ``path`` means: a local folder, a registered name, or a hub id.

    A local folder wins over a registered name, and that over the hub.

    Raises:
        ModelError: nothing of that name can be had; the message gives the value and ``model.path``.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return _checked(folder.resolve(), path)
    registered = model_folder(path)
    if registered is not None:
        return _checked(registered, path)
    if not _HUB_ID.fullmatch(path):
        raise ModelError(f"model.path={path}: there is no such folder. Registered models: {_known()}")
    return _checked(_from_hub(path), path)


def _checked(folder: Path, path: str) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelError(f"model.path={path}: {folder} has no config.json, so it is no Hugging Face model folder")
    return folder


def _from_hub(path: str) -> Path:
    try:
        return Path(snapshot_download(path, allow_patterns=list(_FILES)))
    except Exception as error:  # the hub client raises its own, requests', httpx' and OSError alike
        offline = os.environ.get("HF_HUB_OFFLINE", "")
        why = f" (HF_HUB_OFFLINE={offline}: the hub is not asked)" if offline not in ("", "0") else ""
        raise ModelError(
            f"model.path={path}: no folder and no registered model ({_known()}), and the Hugging Face hub gave nothing"
            f"{why}: {type(error).__name__}: {error}. Set model.path to a folder with the model."
        ) from error


def _known() -> str:
    return ", ".join(names(MODELS)) or "none"
