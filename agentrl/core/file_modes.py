"""File modes of what agentrl writes."""

from __future__ import annotations

import shutil
from pathlib import Path


def give_default_mode(*files: Path) -> None:
    """Give files the mode of a new file in their folder, which the umask sets.

    safetensors writes for the owner only, whatever the umask: an engine or a colleague with another user id could not read
    the weights.
    """
    for file in files:
        probe = file.with_name(f".{file.name}.mode")
        probe.touch()
        shutil.copymode(probe, file)
        probe.unlink()
