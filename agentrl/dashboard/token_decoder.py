"""The decoder of a run's tokens: from its newest checkpoint, or its model."""

from __future__ import annotations

from pathlib import Path

from agentrl.core.errors import AgentrlError
from agentrl.obs.viewer.page import Decode
from agentrl.obs.viewer.run_files import RunFiles


def load_decode(files: RunFiles) -> Decode | str:
    """Return a decoder of tokens from the newest checkpoint or ``model.path``, or the reason why there is none."""
    from agentrl.models.token_text import TOKENIZER_FILE, token_decoder

    tokenizer_files = (
        sorted(files.folder.glob(f"checkpoints/*/model/{TOKENIZER_FILE}")) if files.folder.is_dir() else []
    )
    path = (files.config.get("model") or {}).get("path")
    if not tokenizer_files and not path:
        return f"{files.folder} has no checkpoint with a tokenizer, and no config.yaml that names a model"
    try:
        return token_decoder(tokenizer_files[-1].parent if tokenizer_files else _model_folder(str(path)))
    except AgentrlError as error:
        return str(error)


def _model_folder(path: str) -> Path:
    from agentrl.models.resolve import resolve_model

    return resolve_model(path)
