"""Recorded rollouts without the arrays of their tokens: what lists of thousands of them need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from agentrl.core.errors import ConfigError
from agentrl.core.reading import DECODE_ERRORS, reading
from agentrl.core.types import Rollout
from agentrl.obs.image_files import ImageFiles
from agentrl.obs.parquet import parquet_headers, read_parquet_rollout
from agentrl.obs.records import FRAME_BYTES, record_header, record_size
from agentrl.obs.rollout_format import rollout_from_dict
from agentrl.obs.rollouts import RECORDS, ScannedRollout, scan_line, scan_record

_ROWS, _IDS = b',"rows":[', b'"token_ids":['


@dataclass(frozen=True, slots=True)
class RolloutHeader:
    """A rollout of a file without its rows."""

    rollout: Rollout | str
    """It has no rows; or the reason why it cannot be decoded."""
    tokens: int
    """Tokens of all of its rows."""
    start: int
    """Its first byte in the file; of parquet its number."""
    end: int
    """Behind its last byte; of parquet its number and one."""


def scan_headers(path: Path, start: int = 0) -> Iterator[RolloutHeader]:
    """Iterate over the rollouts of a file from one of them on; an incomplete last one, which is being written, is left out.

    Args:
        path: JSON lines, records or parquet.
        start: `RolloutHeader.end` of the last one that is known; 0 for all.

    Raises:
        ConfigError: the file cannot be read.
    """
    with reading(path, "file of rollouts"):
        if path.suffix == ".parquet":
            for number, (header, tokens) in enumerate(parquet_headers(path)):
                if number >= start:
                    yield _header(header, tokens, number, number + 1)
        elif path.suffix == RECORDS:
            yield from _scan_records(path, start)
        else:
            yield from _scan_lines(path, start)


def _scan_lines(path: Path, start: int) -> Iterator[RolloutHeader]:
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            end = start + len(line)
            yield _line_header(line, start, end)
            start = end


def _line_header(line: bytes, start: int, end: int) -> RolloutHeader:
    """Return the header of a line. Its rows are its last field, of which only the lengths of the ids are counted.

    A quote inside a text has a backslash before it, so that no text can look like a field.
    """
    rows = line.rfind(_ROWS)
    try:
        if rows < 0:
            raise ValueError("it has no rows")
        header = orjson.loads(line[:rows] + b"}")
    except DECODE_ERRORS as error:
        return RolloutHeader(f"not a rollout of agentrl: {error}", 0, start, end)
    tokens, position = 0, line.find(_IDS, rows)
    while position >= 0:
        first = position + len(_IDS)
        position = line.find(b"]", first)
        tokens += line.count(b",", first, position) + 1 if position > first else 0
        position = line.find(_IDS, position)
    return _header(header, tokens, start, end)


def _scan_records(path: Path, start: int) -> Iterator[RolloutHeader]:
    with path.open("rb") as file:
        file.seek(start)
        while len(frame := file.read(FRAME_BYTES)) == FRAME_BYTES:
            size = record_size(frame)
            record = frame + file.read(size - FRAME_BYTES)
            if len(record) < size:
                return
            end = start + size
            try:
                header = record_header(record)
            except DECODE_ERRORS as error:
                yield RolloutHeader(f"not a rollout of agentrl: {error}", 0, start, end)
            else:
                yield _header(header, sum(row["tokens"] for row in header["rows"]), start, end)
            start = end


def _header(header: dict[str, Any], tokens: int, start: int, end: int) -> RolloutHeader:
    try:
        return RolloutHeader(rollout_from_dict({**header, "rows": []}), tokens, start, end)
    except DECODE_ERRORS as error:
        reason = f"not a rollout of agentrl: {type(error).__name__}: {error}"
        return RolloutHeader(reason, tokens, start, end)


def read_rollout(path: Path, start: int, end: int) -> ScannedRollout:
    """Return the whole rollout of a header, which may be damaged.

    Raises:
        ConfigError: the file cannot be read, or has changed since.
    """
    images = ImageFiles(path.parent)
    with reading(path, "file of rollouts"):
        if path.suffix == ".parquet":
            return scan_line(read_parquet_rollout(path, start), images)
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(end - start)
    if len(data) < end - start:
        raise ConfigError(f"{path} has changed: it has no rollout at byte {start} any more")
    return scan_record(data, images) if path.suffix == RECORDS else scan_line(data, images)
