"""The checkpoints of a run: atomic writes in the background, listing, and rotation.

::

    checkpoints/
      step_000020/
        model/ optimizer/ random/ learner.json   written by the learner's `save`
        critic/                                  the same, written by the critic's `save`
        state.json                               the driver's state, with its own CRC-32
        checksums.json                           CRC-32 of all files but state.json
      step_000030.partial/                       being written, or left behind by a kill
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentrl.core.atomic_files import PARTIAL, partial_path, publish, write_atomically
from agentrl.core.background import run_in_daemon_thread
from agentrl.core.checksums import write_checksums
from agentrl.core.errors import CheckpointError
from agentrl.core.reading import reading
from agentrl.learner.base import CriticGroup, LearnerGroup

STATE = "state.json"
CRITIC = "critic"
"""Folder of the critic's state in a checkpoint."""
_CRC = "crc32"
"""Key of the CRC-32 in `STATE`: of the JSON of all others."""
_NAME = re.compile(r"step_(\d{6,})")


class Checkpoints:
    """Writes the checkpoints of one run in the background, and keeps the newest and the best.

    Args:
        folder: created with the first checkpoint.
        keep: number of newest checkpoints that are kept. The one with the highest ``score`` in its state is kept too.
        metric: name of the score; a checkpoint whose ``score_of`` names another one, of before a resume, has no score.
        resumed_from: the checkpoint that the run resumed from, which is kept too: restarted engines load its model, and the
            learner copies its tokenizer files into the next checkpoints.
    """

    def __init__(self, folder: Path, *, keep: int, metric: str | None = None, resumed_from: Path | None = None) -> None:
        self.folder = folder
        self.keep = keep
        self.metric = metric
        self.resumed_from = resumed_from
        self.candidate: int | None = None
        """A step whose ``score`` is not known yet: its checkpoint is kept until then."""
        self._writing: Future[None] | None = None

    def save(self, step: int, learner: LearnerGroup, state: dict[str, Any], critic: CriticGroup | None = None) -> Path:
        """Begin to write the checkpoint of ``step`` and return its folder, which exists once it is complete.

        When it returns, training may continue. The previous checkpoint is waited for. A kill at any time leaves all older
        checkpoints complete.

        Args:
            step: finished optimizer steps.
            learner: writes its state into the folder.
            state: JSON-able; the driver's random states are added as ``random``.
            critic: of the learner; writes its state too.

        Raises:
            LearnerError, OSError: it, or the one before, could not be written; see also `finish`.
        """
        self.finish()
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self._path(step)
        partial_folder = partial_path(target)
        for leftover in self.folder.glob(f"step_*{PARTIAL}"):  # by a kill
            shutil.rmtree(leftover)
        groups: list[LearnerGroup | CriticGroup] = [learner] if critic is None else [learner, critic]
        try:
            for group, folder in zip(groups, (partial_folder, partial_folder / CRITIC), strict=False):
                group.save(folder)
            write_state(partial_folder, _with_random(state))
        except BaseException:
            _end_and_remove(groups, partial_folder)
            raise

        def complete() -> None:
            try:
                for group in groups:
                    group.finish_save()
                write_checksums(partial_folder, without=(STATE,))
                publish(partial_folder, target)
            except BaseException:
                _end_and_remove(groups, partial_folder)
                raise
            self._drop_old()

        self._writing = run_in_daemon_thread(complete, "checkpoints")
        return target

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete.

        Raises:
            LearnerError, OSError: it could not be written, and was removed. Raised once.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def check(self) -> None:
        """Raise as `finish` does if the checkpoint that is being written has failed; do not wait for it."""
        if self._writing is not None and self._writing.done():
            self.finish()

    @property
    def is_writing(self) -> bool:
        """Whether `finish` would wait for a checkpoint, or raise its error."""
        return self._writing is not None

    def save_state(self, step: int, state: dict[str, Any]) -> None:
        """Replace the driver's state in the checkpoint of ``step``; the learner's state is the same."""
        self.finish()
        write_state(self._path(step), _with_random(state))

    def update_state(self, step: int, news: Mapping[str, Any]) -> None:
        """Replace some keys of the driver's state in the checkpoint of ``step``, if there is one.

        Raises:
            LearnerError, OSError: a checkpoint that was being written is not complete; see `finish`.
        """
        self.finish()
        path = self._path(step) / STATE
        if path.is_file():
            write_state(path.parent, load_state(path.parent) | dict(news))

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    def best_score(self) -> float:
        """Return the highest score of a complete checkpoint, or minus infinity."""
        return max(map(self._score, complete_checkpoints(self.folder)), default=float("-inf"))

    def _score(self, checkpoint: Path) -> float:
        score = saved_score(checkpoint, self.metric)
        return float("-inf") if score is None else score

    def _drop_old(self) -> None:
        checkpoints = complete_checkpoints(self.folder)
        best = max(reversed(checkpoints), key=self._score)
        retained = {*checkpoints[-self.keep :], self.resumed_from} | (
            {best} if self._score(best) > float("-inf") else set()
        )
        retained |= set() if self.candidate is None else {self._path(self.candidate)}
        for folder in checkpoints:
            if folder in retained:
                continue
            doomed = partial_path(folder)
            os.replace(
                folder, doomed
            )  # a kill during deletion must not leave half a checkpoint under a complete one's name
            shutil.rmtree(doomed)


def _end_and_remove(groups: Sequence[LearnerGroup | CriticGroup], partial_folder: Path) -> None:
    """Wait for the writers of a failed checkpoint, then remove it, as a full disk needs the space."""
    for group in groups:
        with suppress(Exception):  # one error is enough
            group.finish_save()
    shutil.rmtree(partial_folder, ignore_errors=True)


def _with_random(state: Mapping[str, object]) -> dict[str, object]:
    """Return the driver's state with its random states."""
    from agentrl.learner.random_states import random_states, states_to_json  # torch: listing checkpoints needs none

    return {**state, "random": states_to_json(random_states())}


def write_state(folder: Path, state: Mapping[str, object]) -> None:
    """Write a state as `STATE` of a checkpoint, with its CRC-32: a changed digit would train tasks twice, or never."""
    content = {key: value for key, value in state.items() if key != _CRC}
    with write_atomically(folder / STATE) as partial:
        partial.write_text(json.dumps(content | {_CRC: _state_checksum(content)}), encoding="utf-8")


def load_state(checkpoint: Path) -> dict[str, object]:
    """Return the driver's state of a checkpoint. Without a CRC-32, as in older checkpoints, it is not compared.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    path = checkpoint / STATE
    with reading(path, "state of a whole checkpoint", CheckpointError):
        state = dict[str, object](json.loads(path.read_bytes()).items())
    checksum = state.pop(_CRC, None)
    if checksum is not None and checksum != _state_checksum(state):
        raise CheckpointError(f"{path} is damaged: it is not as it was written (its CRC-32 is another)")
    return state


def _state_checksum(state: Mapping[str, object]) -> str:
    return f"{zlib.crc32(json.dumps(state).encode()):08x}"


def saved_score(checkpoint: Path, metric: str | None = None) -> float | None:
    """Return the ``score`` in a checkpoint's state, or None; an unreadable one is reported when it is resumed from.

    With ``metric``, the score of another metric is ignored. Older checkpoints do not name the metric.
    """
    try:
        state = load_state(checkpoint)
    except CheckpointError:
        return None
    score = state.get("score") if metric is None or state.get("score_of", metric) == metric else None
    return float(score) if isinstance(score, int | float) else None


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return the folders in ``folder`` with names of complete checkpoints, oldest first; a copy of a run may lack files."""
    if not folder.is_dir():
        return []
    numbered = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in ``folder``, oldest first."""
    return [path for path in checkpoint_folders(folder) if (path / STATE).is_file()]


def checkpoint_step(folder: Path) -> int:
    """Return the step of a checkpoint's folder."""
    match = _NAME.fullmatch(folder.name)
    assert match is not None, folder
    return int(match[1])


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in ``folder``, or None."""
    checkpoints = complete_checkpoints(folder)
    return checkpoints[-1] if checkpoints else None


def older_checkpoint(checkpoint: Path) -> Path | None:
    """Return the complete checkpoint before another one, or None."""
    folders = checkpoint_folders(checkpoint.parent)
    older = folders[: folders.index(checkpoint)] if checkpoint in folders else []
    return next((path for path in reversed(older) if (path / STATE).is_file()), None)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the driver's state of a checkpoint, and restore its random states.

    Raises:
        CheckpointError: the state is missing or unreadable.
    """
    from agentrl.learner.random_states import restore_random, states_from_json

    with reading(checkpoint / STATE, "state of a whole checkpoint", CheckpointError):
        state: dict[str, Any] = load_state(checkpoint)
        if state["random"] is not None:  # that of a fork whose tasks begin again
            restore_random(states_from_json(state["random"]))
        return state


def begin_random(state: Mapping[str, Any], seed: int) -> None:
    """Set the driver's random generators for the next step: to a checkpoint's ``state``, in a new run from the seed."""
    from agentrl.learner.random_states import restore_random, seed_everything, states_from_json

    if (random := state.get("random")) is not None:
        restore_random(states_from_json(random))
    else:
        seed_everything(seed)
