"""Rollout files: one file per step, and the advantages with which its rollouts were trained.

::

    rollouts/
      step_000012.jsonl             one JSON object per line, written when a rollout ends; or
      step_000012.rollouts          compressed records, see `agentrl.obs.records`; or
      step_000012.parquet           the same, converted from the lines when the step is complete
      step_000012.advantages.json   {rollout_id: advantage} of all rollouts that were not dropped
      eval_000012.jsonl             with eval.save_rollouts: those of the evaluation after the step
      images/                       of all of them, each once; see `agentrl.obs.image_files`
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

from agentrl.core.atomic_files import append, write_atomically
from agentrl.core.errors import ConfigError
from agentrl.core.reading import DECODE_ERRORS, reading
from agentrl.core.types import Rollout
from agentrl.obs.image_files import ImageFiles
from agentrl.obs.parquet import iter_parquet, write_parquet
from agentrl.obs.records import all_images, decode_record, encode_record, split_records
from agentrl.obs.rollout_format import ARRAYS, encode_rollout, rollout_checksum, rollout_from_dict, row_checksum

Keep = Literal["all", "first", "none"]
"""Which of a step's rollouts are written: all, those of the step's first task, or none."""

Form = Literal["jsonl", "parquet", "records"]
"""The format of files of rollouts."""
RECORDS = ".rollouts"
"""Suffix of a file of records."""
SUFFIXES: Mapping[Form, str] = {"jsonl": ".jsonl", "parquet": ".parquet", "records": RECORDS}
"""By format."""

_STEP = re.compile(r"step_(\d{6,})\.(?:jsonl|parquet|rollouts|advantages\.json)")
_EVALUATION = re.compile(r"eval_(\d{6,})\.(?:jsonl|parquet|rollouts)")


class RolloutFile:
    """A file of rollouts to which each rollout is appended when it ends; `write` returns after the system call.

    A rollout of which a full disk takes only a part is removed.

    Args:
        path: ``….jsonl``, ``….rollouts``, or ``….parquet``; JSON lines next to it are converted to parquet by `finish`.
        rollouts: that it begins with, in place of what the path has.
    """

    def __init__(self, path: Path, rollouts: Sequence[Rollout] = ()) -> None:
        self.path = path
        self.lines = path if path.suffix == RECORDS else path.with_suffix(".jsonl")
        """To which rollouts are appended."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._images = ImageFiles(path.parent)
        with write_atomically(self.lines) as partial, partial.open("wb") as file:
            file.writelines(self._encode(rollout, number) for number, rollout in enumerate(rollouts))
        if self.path != self.lines:
            path.unlink(missing_ok=True)
        self._written = len(rollouts)

    def write(self, rollouts: Rollout | Sequence[Rollout]) -> None:
        """Append rollouts, one by one: a step may have gigabytes of them, and no thread runs while they are joined."""
        for rollout in [rollouts] if isinstance(rollouts, Rollout) else rollouts:
            append(self.lines, self._encode(rollout, self._written))
            self._written += 1

    def _encode(self, rollout: Rollout, number: int) -> bytes:
        images = all_images(rollout)
        self._images.write(images)
        if self.path.suffix == RECORDS:
            if any(row.experts is not None for row in rollout.rows):  # they are not recorded in files
                rows = [replace(row, experts=None) for row in rollout.rows]
                return encode_record(replace(rollout, rows=rows), with_images=False)
            return (not images and rollout.record) or encode_record(rollout, with_images=False)
        return encode_rollout(rollout, number)

    def finish(self) -> Path:
        """Complete the file, and return its path."""
        if self.path != self.lines:
            write_parquet(self.path, read_rollouts(self.lines))
            self.lines.unlink()
        return self.path


class RolloutRecorder:
    """Writes the rollouts of a run. If a step is run again, its file is overwritten.

    Args:
        folder: ``rollouts/`` of the run.
        keep: which rollouts of each step are written.
        form: file format.
    """

    def __init__(self, folder: Path, *, keep: Keep = "all", form: Form = "jsonl") -> None:
        self.folder = folder
        self._keep = keep
        self._suffix = SUFFIXES[form]
        self._first: dict[int, str] = {}
        self._files: dict[int, RolloutFile] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def delete_after(self, step: int) -> None:
        """Delete the files of steps after ``step``, which a resumed run repeats."""
        for path in self.folder.iterdir():
            match = _STEP.fullmatch(path.name) or _EVALUATION.fullmatch(path.name)
            if match and int(match[1]) > step:
                path.unlink()

    def begin(self, step: int, first: str) -> None:
        """Start a step whose first task is ``first``; without this call it is the task of the first rollout written."""
        self._first[step] = first

    def write(self, step: int, rollouts: Rollout | Sequence[Rollout]) -> None:
        """Append rollouts, as far as they are kept, to the step's file."""
        batch = [rollouts] if isinstance(rollouts, Rollout) else rollouts
        if self._keep == "first" and batch:
            first = self._first.setdefault(step, batch[0].prompt_id)
            batch = [rollout for rollout in batch if rollout.prompt_id == first]
        if self._keep == "none" or not batch:
            return
        if step not in self._files:
            self._files[step] = RolloutFile(self.folder / f"{step_name(step)}{self._suffix}")
        self._files[step].write(batch)

    def evaluation(self, step: int) -> RolloutFile:
        """Return a file for the rollouts of the evaluation after a step."""
        return RolloutFile(self.folder / f"eval_{step:06d}{self._suffix}")

    def finish(self, step: int, advantages: Mapping[str, float]) -> None:
        """Complete a step's file, and write the ``advantages`` with which its rollouts are trained."""
        file = self._files.pop(step, None)
        self._first.pop(step, None)
        if file is not None:
            file.finish()
            write_advantages(self.folder, step, advantages)


def sampled_with(path: Path) -> Path:
    """Return the file next to a rollout file of ``agentrl rollout`` that names the model: ``samples.config.yaml``."""
    return path.with_suffix(".config.yaml")


def step_name(step: int) -> str:
    """Return the name of a step's files without the suffix."""
    return f"step_{step:06d}"


def read_rollouts(path: Path) -> list[Rollout]:
    """Return the rollouts of a file; an incomplete last line or record, from a killed run, is skipped.

    Raises:
        ConfigError: the file or an image of its rollouts cannot be read or has changed, or a line is not a rollout.
    """
    images = ImageFiles(path.parent)
    if path.suffix == ".parquet":
        return [_decode(f"{path}, rollout {number}", data, images) for number, data in enumerate(iter_parquet(path), 1)]
    if path.suffix == RECORDS:
        records = enumerate(_records(path), 1)
        return [_decode_record(f"{path}, record {number}", record, images) for number, record in records]
    with reading(path, "file of rollouts"):
        lines = path.read_bytes().split(b"\n")
    return [_decode(f"{path}, line {number}", line, images) for number, line in enumerate(lines[:-1], 1)]


def _records(path: Path) -> list[bytes]:
    with reading(path, "file of rollouts"):
        return split_records(path.read_bytes(), may_be_torn=True)


def _decode_record(location: str, record: bytes, images: ImageFiles) -> Rollout:
    with reading(location, "rollout of agentrl"):
        return decode_record(record, images.read)


def count_rollouts(path: Path) -> int:
    """Return the number of rollouts in a file of lines or records.

    Raises:
        ConfigError: the file cannot be read.
    """
    if path.suffix == RECORDS:
        return len(_records(path))
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


class ScannedRollout(NamedTuple):
    """A line of a file, which may be damaged."""

    rollout: Rollout | str
    """The rollout, or the reason why it cannot be decoded."""
    damaged: Sequence[int | None] = ()
    """Indices of its rows whose checksum is wrong; None if that of the rollout as a whole is."""
    number: int | None = None
    """Its place in the file that it was written to, from 0; None if it was written to none."""


def scan_rollouts(path: Path) -> Iterator[ScannedRollout]:
    """Iterate over a file's rollouts one at a time, including damaged ones; for checks.

    Raises:
        ConfigError: the file cannot be read.
    """
    images = ImageFiles(path.parent)
    if path.suffix == ".parquet":
        for data in iter_parquet(path):
            yield scan_line(data, images)
        return
    if path.suffix == RECORDS:
        for record in _records(path):
            yield scan_record(record, images)
        return
    try:
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield scan_line(line, images)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None


def scan_record(record: bytes, images: ImageFiles) -> ScannedRollout:
    """Return the rollout of a record of a file with these images, or why it cannot be decoded."""
    try:
        return ScannedRollout(decode_record(record, images.read))
    except ConfigError as error:
        return ScannedRollout(str(error))
    except DECODE_ERRORS as error:
        return ScannedRollout(f"not a rollout of agentrl: {type(error).__name__}: {error}")


def scan_line(line: bytes | dict[str, Any], images: ImageFiles) -> ScannedRollout:
    """Return the rollout of a line, or of the dictionary in it, or why it cannot be decoded.

    Args:
        line: of a file of rollouts.
        images: of the file.
    """
    try:
        return _decode_and_verify(line, images)
    except ConfigError as error:
        return ScannedRollout(str(error))
    except DECODE_ERRORS as error:
        return ScannedRollout(f"not a rollout of agentrl: {type(error).__name__}: {error}")


def _decode_and_verify(line: bytes | dict[str, Any], images: ImageFiles) -> ScannedRollout:
    """Return a rollout, and which of its checksums are wrong."""
    data = orjson.loads(line) if isinstance(line, bytes) else line
    rollout = rollout_from_dict(data, images.read)
    rows = enumerate(zip(rollout.rows, data["rows"], strict=True))
    damaged: list[int | None] = [index for index, (row, saved) in rows if saved.get("crc32") != row_checksum(row)]
    number = data["number"]
    if not damaged and data["checksum"] != rollout_checksum(rollout, number, data.keys()):
        damaged.append(None)
    return ScannedRollout(rollout, damaged, number)


def _decode(location: str, line: bytes | dict[str, Any], images: ImageFiles) -> Rollout:
    with reading(location, "rollout of agentrl"):
        rollout, damaged, _ = _decode_and_verify(line, images)
        assert isinstance(rollout, Rollout)
        for row in rollout.rows:
            shapes = {name: getattr(row, name).shape for name in ARRAYS}
            if len(set(shapes.values())) > 1 or row.token_ids.ndim != 1:
                raise ValueError(
                    f"row {row.key.row} of rollout {rollout.rollout_id!r} has arrays of the shapes {shapes}"
                )
        if damaged:
            row_text = "" if damaged[0] is None else f"row {damaged[0]} of "
            raise ConfigError(
                f"{location}: the checksum (crc32) of {row_text}rollout {rollout.rollout_id!r} is wrong: it is not as it was "
                "written; agentrl audit checks the whole file"
            )
        return rollout


def evaluation_files(folder: Path) -> dict[int, Path]:
    """Return the files of the evaluations in a folder of rollouts by step; of JSON lines and another form the other."""
    files = ((_EVALUATION.fullmatch(path.name), path) for path in sorted(folder.iterdir()))
    return dict(sorted((int(match[1]), path) for match, path in files if match))


def rollout_files(folder: Path, *, evaluation: bool = False) -> dict[int, Path]:
    """Return the rollout files of a run's folder, or of its ``rollouts/``, by step; of JSON lines and another form the other.

    With ``evaluation`` those of the evaluations after the steps.
    """
    pattern = _EVALUATION if evaluation else _STEP
    inner = folder / "rollouts"
    files: dict[int, Path] = {}
    for path in sorted((inner if inner.is_dir() else folder).iterdir()):  # .jsonl before .parquet
        if (match := pattern.fullmatch(path.name)) and path.suffix != ".json":
            files[int(match[1])] = path
    return dict(sorted(files.items()))


def write_advantages(folder: Path, step: int, advantages: Mapping[str, float]) -> Path:
    """Write the advantages of a step's rollouts by ``rollout_id``; return the file's path."""
    path = folder / f"{step_name(step)}.advantages.json"
    with write_atomically(path) as partial:
        partial.write_text(json.dumps(dict(advantages)), encoding="utf-8")
    return path


def trained_rollouts(path: Path) -> set[str]:
    """Return the ids of the rollouts that were trained in the step of a file; empty if none were, or it is of no step."""
    match = _STEP.fullmatch(path.name)
    return set(read_advantages(path.parent, int(match[1]))) if match else set()


def read_advantages(folder: Path, step: int) -> dict[str, float]:
    """Return the advantages of a step by ``rollout_id``; empty if the step was not trained on."""
    path = folder / f"{step_name(step)}.advantages.json"
    if not path.is_file():
        return {}
    with reading(path, "file of advantages"):
        return {str(key): float(value) for key, value in orjson.loads(path.read_bytes()).items()}
