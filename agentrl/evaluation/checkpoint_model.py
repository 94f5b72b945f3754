"""The model folder that a run, a checkpoint or a folder names."""

from __future__ import annotations

import shlex
from pathlib import Path

from agentrl.config.layers import CONFIG
from agentrl.core.checksums import check_checksums
from agentrl.core.errors import CheckpointError, ConfigError
from agentrl.learner.checkpoints import latest_checkpoint, older_checkpoint
from agentrl.models.sharded_weights import POLICIES, WEIGHTS, is_sharded
from agentrl.models.weight_writer import DRAFTS


def checkpoint_model(name: str, option: str = "--checkpoint") -> str:
    """Return the model folder of a run, a checkpoint or a model folder, with weights that engines load.

    A message names ``option``, which gave the name.

    Raises:
        ConfigError: the folder holds none of them, or the checkpoint was written without a Hugging Face folder of its weights.
        CheckpointError: see `check_model`.
    """
    path = exported_model(name, option)
    _check_loadable(Path(path))
    return path


def _check_loadable(model: Path) -> None:
    if is_sharded(model):
        command = shlex.join(["agentrl", "export", str(model.parent), "my-policy"])
        raise ConfigError(
            f"{model.parent} has no Hugging Face folder of its weights (learner.save_hf); make one with\n  {command}\nand use "
            "my-policy in its place"
        )


def exported_model(name: str, option: str) -> str:
    """Return the model folder of a run, a checkpoint or a model folder; that of a checkpoint may have no weights.

    Raises:
        ConfigError: the folder holds none of them.
        CheckpointError: see `check_model`.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return name
    if (folder / "config.json").is_file():
        model = folder
    elif (folder / "model" / "config.json").is_file():
        model = folder / "model"
    else:
        checkpoint = latest_checkpoint(folder / "checkpoints")
        if checkpoint is None:
            raise ConfigError(f"{option} {name}: neither a model, a checkpoint, nor a run with a whole checkpoint")
        model = checkpoint / "model"
    _check_files(model)
    return str(model)


def check_model(model: Path) -> None:
    """Check that the model of a checkpoint is as it was written, and loads; models of other folders have no checksums.

    Raises:
        ConfigError: the checkpoint was written without a Hugging Face folder of its weights.
        CheckpointError: a file is damaged; the message names it, and the checkpoint before it.
    """
    _check_loadable(model)
    _check_files(model)


def _check_files(model: Path) -> None:
    checkpoint = model.parent
    try:
        check_checksums(checkpoint, "model", POLICIES, WEIGHTS, DRAFTS)
    except CheckpointError as error:
        older = older_checkpoint(checkpoint)
        raise CheckpointError(f"{error}" + (f". The checkpoint before it is {older}" if older else "")) from error


def find_run_folder(name: str) -> Path | None:
    """Return the folder of the run that a folder is, or that a checkpoint belongs to, or None."""
    folder = Path(name).expanduser().resolve()
    for parent in (folder, *folder.parents[:3]):  # RUN/checkpoints/step_000012/model
        if (parent / CONFIG).is_file() and (parent / "checkpoints").is_dir():
            return parent
    return None
