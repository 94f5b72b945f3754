"""Architectures of published models: their ``config.json`` without weights, so that a plan needs no download."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.core.errors import MissingError, ModelError
from agentrl.models.load import model_config, new_model, parameters_on_meta
from agentrl.models.resolve import resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FOLDER = Path(__file__).parent / "architectures"
_VARIANTS = ("-Instruct", "-Base")
"""Endings of names of one architecture."""


def shipped_architectures() -> dict[str, Path]:
    """Return the folders of shipped architectures by hub id. A folder has ``config.json`` and nothing else."""
    return {f"{file.parent.parent.name}/{file.parent.name}": file.parent for file in sorted(_FOLDER.glob("*/*/*.json"))}


def find_architecture(path: str, key: str = "model.path") -> Path:
    """Return a folder with the ``config.json`` of a model: its own, from the hub's cache, or a shipped one. Downloads nothing.

    Args:
        path: a folder, a registered name, or a hub id; ``-Instruct`` and ``-Base`` may be left out of a shipped one's.
        key: configuration key of the path, for messages.

    Raises:
        ModelError: there is none; the message lists what is shipped.
    """
    try:
        return resolve_model(path, key, fetch=False)
    except MissingError:
        if (folder := shipped_architecture(path)) is not None:
            return folder
        raise ModelError(
            f"{key}={path}: no such folder, it is not in the cache of the Hugging Face hub, and agentrl has no architecture "
            f"of that name, only {', '.join(shipped_architectures())}; set {key} to a folder with the model's config.json"
        ) from None


def shipped_architecture(path: str) -> Path | None:
    """Return the shipped folder of a hub id, or of the name of a model in a package; None if there is none."""
    folders = shipped_architectures()
    by_stem = {_stem(name): folder for name, folder in folders.items()}
    by_stem |= {_stem(name.rpartition("/")[2]): folder for name, folder in folders.items()}
    return by_stem.get(_stem(path))


def meta_model(folder: Path, key: str = "model.path", *, values: bool = False) -> PreTrainedModel:
    """Return the model of a ``config.json`` with all tensors on ``meta``: it takes no memory, whatever its size.

    Args:
        folder: with ``config.json``.
        key: configuration key of the folder, for messages.
        values: with a value head in place of the language head.

    Raises:
        ModelError: the folder has no causal model that transformers knows.
    """
    import torch

    try:
        config = model_config(folder, values=values)
        with torch.device("meta"), parameters_on_meta():
            model = new_model(config, values=values)
    except Exception as error:  # transformers raises errors of many kinds
        raise ModelError(f"{key}={folder}: no model of this architecture can be built: {error}") from error
    return model


def _stem(name: str) -> str:
    for ending in _VARIANTS:
        name = name.removesuffix(ending)
    return name.lower()
