"""The model folder that a run, a checkpoint or a folder names."""

from __future__ import annotations

from pathlib import Path

from agentrl.config.saved import CONFIG
from agentrl.core.errors import ConfigError
from agentrl.learner.checkpoints import latest_checkpoint


def checkpoint_model(name: str) -> str:
    """Return the model folder of a run, a checkpoint or a model folder.

    Raises:
        ConfigError: the folder holds none of them.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return name
    if (folder / "config.json").is_file():
        return str(folder)
    if (folder / "model" / "config.json").is_file():
        return str(folder / "model")
    checkpoint = latest_checkpoint(folder / "checkpoints")
    if checkpoint is None:
        raise ConfigError(f"--checkpoint {name}: neither a model, a checkpoint, nor a run with a whole checkpoint")
    return str(checkpoint / "model")


def find_run_folder(name: str) -> Path | None:
    """Return the folder of the run that a folder is, or that a checkpoint belongs to, or None."""
    folder = Path(name).expanduser().resolve()
    for parent in (folder, *folder.parents[:3]):  # RUN/checkpoints/step_000012/model
        if (parent / CONFIG).is_file() and (parent / "checkpoints").is_dir():
            return parent
    return None
