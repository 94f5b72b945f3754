"""The checkpoints of a run: atomic writes, listing, and rotation.

::

    checkpoints/
      step_000020/
        model/ optimizer/ random/ learner.json   written by the learner's `save`
      critic/                                  the same, written by the critic's `save`
        state.json                               the driver's state
      step_000030.partial/                       being written, or left behind by a kill
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from agentrl.core.atomic_files import PARTIAL, partial_path, publish, replacing
from agentrl.core.errors import CheckpointError
from agentrl.core.reading import reading
from agentrl.learner.base import CriticGroup, LearnerGroup
from agentrl.learner.random_states import random_states, restore_random, states_from_json, states_to_json

STATE = "state.json"
CRITIC = "critic"
"""Folder of the critic's state in a checkpoint."""
_NAME = re.compile(r"step_(\d{6,})")


class Checkpoints:
    """Writes the checkpoints of one run and keeps the newest.

    Args:
        folder: created with the first checkpoint.
        keep: number of checkpoints that are kept.
        began_with: the checkpoint that the run resumed from, which is kept too: restarted engines load its model, and the
            learner copies its tokenizer files into the next checkpoints.

    """

    def __init__(self, folder: Path, *, keep: int, began_with: Path | None = None) -> None:
        self.folder = folder
        self.keep = keep
        self.began_with = began_with

    def save(self, step: int, learner: LearnerGroup, state: dict[str, Any], critic: CriticGroup | None = None) -> Path:
        """Write the checkpoint of ``step`` and return its folder. A kill at any time leaves all older checkpoints complete.

        Args:
            step: finished optimizer steps.
            learner: writes its state into the folder.
            state: JSON-able; the driver's random states are added as ``random``.
            critic: of the learner; writes its state too.

        """
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self.folder / f"step_{step:06d}"
        part = partial_path(target)
        for left in self.folder.glob(f"step_*{PARTIAL}"):  # by a kill
            shutil.rmtree(left)
        try:
            learner.save(part)
            if critic is not None:
                critic.save(part / CRITIC)
            _write_state(part, state)
            publish(part, target)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)  # a full disk needs the space
            raise
        self._drop_old()
        return target

    def save_state(self, step: int, state: dict[str, Any]) -> None:
        """Replace the driver's state in the checkpoint of ``step``, to which the learner has nothing to add."""
        _write_state(self.folder / f"step_{step:06d}", state)

    def _drop_old(self) -> None:
        for folder in whole_checkpoints(self.folder)[: -self.keep]:
            if folder == self.began_with:
                continue
            doomed = partial_path(folder)
            os.replace(
                folder, doomed
            )  # a kill during deletion must not leave half a checkpoint under a complete one's name
            shutil.rmtree(doomed)


def _write_state(folder: Path, state: dict[str, Any]) -> None:
    with replacing(folder / STATE) as partial:
        partial.write_text(json.dumps(state | {"random": states_to_json(random_states())}), encoding="utf-8")


def whole_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in ``folder``, oldest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if (path / STATE).is_file()]


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in ``folder``, or None."""
    found = whole_checkpoints(folder)
    return found[-1] if found else None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the driver's state of a checkpoint, and restore its random states.

    Raises:
        CheckpointError: the state is missing or unreadable.

    """
    with reading(checkpoint / STATE, "state of a whole checkpoint", CheckpointError):
        state: dict[str, Any] = json.loads((checkpoint / STATE).read_bytes())
        restore_random(states_from_json(state["random"]))
        return state
