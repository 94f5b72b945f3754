"""The decoder of a run's tokens: from its newest checkpoint, or its model."""

from __future__ import annotations

from pathlib import Path

from agentrl.core.errors import AgentrlError
from agentrl.obs.viewer.page import Decode
from agentrl.obs.viewer.run_files import RunFiles


def load_decode(files: RunFiles) -> Decode | str:
    """Return a decoder of tokens from the newest checkpoint or ``model.path``, or the reason why there is none."""
    from agentrl.models.token_text import token_decoder

    try:
        folder = tokenizer_folder(files)
        return folder if isinstance(folder, str) else token_decoder(folder)
    except AgentrlError as error:
        return str(error)


def tokenizer_folder(files: RunFiles) -> Path | str:
    """Return the folder of a run's tokenizer: its newest checkpoint or ``model.path``; or the reason why there is none.

    Raises:
        AgentrlError: the model is not on this machine.
    """
    from agentrl.models.token_text import TOKENIZER_FILE

    checkpoints = sorted(files.folder.glob(f"checkpoints/*/model/{TOKENIZER_FILE}")) if files.folder.is_dir() else []
    if checkpoints:
        return checkpoints[-1].parent
    path = (files.config.get("model") or {}).get("path")
    if not path:
        return f"{files.folder} has no checkpoint with a tokenizer, and no config.yaml that names a model"
    return _model_folder(str(path))


def _model_folder(path: str) -> Path:
    from agentrl.models.resolve import resolve_model

    return resolve_model(path)
