"""How a run has ended: a file in its folder, which only a killed process does not write."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from agentrl.config.secret_values import hide_secrets
from agentrl.core.atomic_files import write_atomically
from agentrl.core.reading import reading

END = "end.json"
"""File in the run's folder."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The end of a run."""

    error: str
    """Class of the exception that ended it; empty if it finished."""
    message: str
    """Message of the exception."""
    time: float
    """Seconds since the epoch."""


@contextmanager
def recorded_end(folder: Path, *, resumed: bool = False) -> Iterator[Callable[[], None]]:
    """Record how what is inside ends; the record of an earlier end is removed first.

    Args:
        folder: of the run.
        resumed: record nothing, and keep the earlier record, until the function that is yielded is called: a resume that is
            refused changes nothing.
    """
    has_begun = False

    def begin() -> None:
        nonlocal has_begun
        has_begun = True
        (folder / END).unlink(missing_ok=True)

    if not resumed:
        begin()
    try:
        yield begin
    except BaseException as error:
        if has_begun:
            _write(folder, RunEnd(type(error).__name__, hide_secrets(str(error)), time.time()))
        raise
    _write(folder, RunEnd("", "", time.time()))


def _write(folder: Path, end: RunEnd) -> None:
    try:
        with write_atomically(folder / END) as partial:
            partial.write_text(json.dumps(asdict(end)) + "\n", encoding="utf-8")
    except OSError:
        pass  # a full disk, which is the error that is being raised


def read_end(folder: Path) -> RunEnd | None:
    """Return how a run has ended, or None if it has not, or was killed.

    Raises:
        ConfigError: the file is damaged.
    """
    path = folder / END
    if not path.is_file():
        return None
    with reading(path, "record of a run's end"):
        record = orjson.loads(path.read_bytes())
        return RunEnd(str(record["error"]), str(record["message"]), float(record["time"]))
