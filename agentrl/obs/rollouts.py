"""Rollouts on disk: a file a step, and beside it the advantages that they were trained with.

::

    rollouts/
      step_000012.jsonl             one JSON object a line, written as rollouts end; or
      step_000012.parquet           the same, made of the lines once the step is whole
      step_000012.advantages.json   {rollout_id: advantage} of all that were not dropped
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import orjson

from agentrl.core.errors import ConfigError
from agentrl.core.types import Rollout
from agentrl.obs.parquet import iter_parquet, read_parquet, write_parquet
from agentrl.obs.rollout_format import decode_rollout, encode_rollout, rollout_from_dict, row_checksum

Keep = Literal["all", "first", "none"]
"""Which of a step's rollouts are written: all, those of the step's first task, or none."""

_NO_ROLLOUT = (ValueError, KeyError, TypeError, AttributeError, OverflowError)
"""What comes of reading what is no rollout."""

_STEP = re.compile(r"step_(\d{6,})\.(?:jsonl|parquet|advantages\.json)")


class RolloutFile:
    """One file of rollouts, written as they come: each is handed to the system before `write` returns.

    Args:
        path: ``….jsonl``, or ``….parquet``, which `finish` makes of the JSON lines that lie beside it until then.

    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = path.with_suffix(".jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self.lines.write_bytes(b"")

    def write(self, rollouts: Rollout | Sequence[Rollout]) -> None:
        """Add rollouts."""
        some = [rollouts] if isinstance(rollouts, Rollout) else rollouts
        with self.lines.open("ab") as file:
            file.write(b"".join(encode_rollout(rollout) for rollout in some))

    def finish(self) -> Path:
        """Say that no rollout follows, and return the file's path."""
        if self.path != self.lines:
            write_parquet(self.path, read_rollouts(self.lines))
            self.lines.unlink()
        return self.path


class RolloutRecorder:
    """Writes the rollouts of a run. A step that is done again starts its file anew.

    Args:
        folder: ``rollouts/`` of the run.
        keep: which rollouts of each step.
        form: how a step's file ends.
        after: files of later steps are deleted: a resumed run does those steps again.

    """

    def __init__(
        self, folder: Path, *, keep: Keep = "all", form: Literal["jsonl", "parquet"] = "jsonl", after: int | None = None
    ) -> None:
        self.folder = folder
        self._keep = keep
        self._form = form
        self._first: dict[int, str] = {}
        self._files: dict[int, RolloutFile] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if after is not None:
            for path in folder.iterdir():
                if (match := _STEP.fullmatch(path.name)) and int(match[1]) > after:
                    path.unlink()

    def begin(self, step: int, first: str) -> None:
        """Begin a step whose first task is ``first``; without this it is that of the rollout written first."""
        self._first[step] = first

    def write(self, step: int, rollouts: Rollout | Sequence[Rollout]) -> None:
        """Add those of the rollouts that are kept to the step's file."""
        some = [rollouts] if isinstance(rollouts, Rollout) else rollouts
        if self._keep == "first" and some:
            first = self._first.setdefault(step, some[0].prompt_id)
            some = [rollout for rollout in some if rollout.prompt_id == first]
        if self._keep == "none" or not some:
            return
        if step not in self._files:
            self._files[step] = RolloutFile(self.folder / f"{step_name(step)}.{self._form}")
        self._files[step].write(some)

    def finish(self, step: int, advantages: Mapping[str, float]) -> None:
        """Say that a step is whole; ``advantages`` are what its rollouts are trained with."""
        file = self._files.pop(step, None)
        self._first.pop(step, None)
        if file is not None:
            file.finish()
            write_advantages(self.folder, step, advantages)


def step_name(step: int) -> str:
    """Return what the files of a step are called, without their suffix."""
    return f"step_{step:06d}"


def read_rollouts(path: Path) -> list[Rollout]:
    """Return the rollouts of a JSON lines or parquet file; a last line that a kill cut short is left out.

    Raises:
        ConfigError: the file cannot be read, or a line of it is no rollout.

    """
    if path.suffix == ".parquet":
        return read_parquet(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    return [_decode(path, number, line) for number, line in enumerate(lines[:-1], 1)]


def scan_rollouts(path: Path) -> Iterator[tuple[Rollout | str, list[int]]]:
    """Iterate over a file's rollouts one at a time, those that are damaged included; for checks.

    Yields:
        a rollout, or in words why it is none, and the places of its rows that are not as they were written.

    Raises:
        ConfigError: the file cannot be read.

    """
    if path.suffix == ".parquet":
        yield from map(_scanned, iter_parquet(path))
        return
    try:
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield _scanned(line)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None


def _scanned(line: bytes | dict[str, Any]) -> tuple[Rollout | str, list[int]]:
    try:
        data = orjson.loads(line) if isinstance(line, bytes) else line
        rollout = rollout_from_dict(data)
        rows = enumerate(zip(rollout.rows, data["rows"], strict=True))
        return rollout, [place for place, (row, saved) in rows if saved.get("crc32") != row_checksum(row)]
    except _NO_ROLLOUT as error:
        return f"no rollout as agentrl writes them: {type(error).__name__}: {error}", []


def _decode(path: Path, number: int, line: bytes) -> Rollout:
    try:
        return decode_rollout(line)
    except _NO_ROLLOUT as error:
        raise ConfigError(
            f"{path}, line {number}: no rollout as agentrl writes them: {type(error).__name__}: {error}"
        ) from None


def rollout_files(folder: Path) -> dict[int, Path]:
    """Return the files of a run's folder, or of its ``rollouts/``, by step; a step's parquet file goes before its lines."""
    inner = folder / "rollouts"
    found: dict[int, Path] = {}
    for path in sorted((inner if inner.is_dir() else folder).iterdir()):  # .jsonl before .parquet
        if (match := _STEP.fullmatch(path.name)) and path.suffix != ".json":
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def read_run(folder: Path) -> Iterator[tuple[int, list[Rollout]]]:
    """Iterate over the steps of a run's folder, or of its ``rollouts/``, reading one at a time."""
    for step, path in rollout_files(folder).items():
        yield step, read_rollouts(path)


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
