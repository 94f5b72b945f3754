"""Rollouts on disk: ``step_000012.jsonl`` a step, and beside it the advantages that they were trained with.

::

    rollouts/
      step_000012.jsonl             one JSON object a line, or step_000012.parquet
      step_000012.advantages.json   {rollout_id: advantage} of all that were not dropped
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.obs.rolloutformat import decode_rollout, encode_rollout
from agentrl.types import Rollout


class RolloutRecorder:
    """Writes rollouts under ``folder`` as they come; each is handed to the system before `write` returns.

    A step that is done again after a resume starts its file anew.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._begun: set[Path] = set()
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, rollouts: Rollout | Sequence[Rollout]) -> Path:
        """Add rollouts to a step's file and return its path."""
        path = self.folder / f"{step_name(step)}.jsonl"
        some = [rollouts] if isinstance(rollouts, Rollout) else rollouts
        with path.open("ab" if path in self._begun else "wb") as file:
            file.write(b"".join(encode_rollout(rollout) for rollout in some))
        self._begun.add(path)
        return path


def step_name(step: int) -> str:
    """Return what the files of a step are called, without their suffix."""
    return f"step_{step:06d}"


def read_rollouts(path: Path) -> list[Rollout]:
    """Return the rollouts of a file; a last line that a kill cut short is left out."""
    lines = path.read_bytes().split(b"\n")
    return [decode_rollout(line) for line in lines[:-1]]


def write_advantages(folder: Path, step: int, advantages: Mapping[str, float]) -> Path:
    """Write the advantage of each rollout of a step, by ``rollout_id``, beside its rollouts; return the file's path."""
    path = folder / f"{step_name(step)}.advantages.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(dict(advantages)), encoding="utf-8")
    os.replace(partial, path)
    return path


def read_advantages(folder: Path, step: int) -> dict[str, float]:
    """Return what `write_advantages` wrote; empty where the step was not trained on."""
    path = folder / f"{step_name(step)}.advantages.json"
    if not path.is_file():
        return {}
    found: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    return found
