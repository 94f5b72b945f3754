"""Rows of JSONL files, parquet files and Hugging Face datasets, with their places for messages."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.core.extras import require
from agentrl.core.reading import reading
from agentrl.data.hub import is_dataset, open_dataset

SUFFIXES = (".jsonl", ".parquet")
"""Formats of files; `agentrl.data.hub` has the others."""
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file."""

    path: Path
    """The file."""
    number: int
    """Its line in JSONL, its row in other formats, from 1."""
    values: Mapping[str, Any]
    """Its columns."""
    unread: tuple[str, ...] = ()
    """Further columns of the file, which were not read."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns, for messages."""
        return (*self.values, *self.unread)

    @property
    def place(self) -> str:
        """The place, for messages. Example: ``train.jsonl, line 17``."""
        return place_of(self.path, self.number)

    def get(self, column: str, key: str) -> Any:
        """Return the value of ``column``, which the configuration key ``key`` names.

        Raises:
            ConfigError: the row has no such column, or nothing in it.

        """
        value = self.values.get(column)
        if value is None:
            fault = "is null" if column in self.values else "is missing"
            has = ", ".join(self.columns) or "none"
            raise ConfigError(f"{self.place}: {column!r} ({key}={column}) {fault}; the row has the keys: {has}")
        return value


def place_of(path: Path, number: int) -> str:
    """Return the place of a row, for messages. Example: ``train.jsonl, line 17``."""
    return f"{path}, {'line' if path.suffix == '.jsonl' else 'row'} {number}"


def read_rows(path: Path, key: str, columns: Collection[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a file or dataset; empty lines of JSONL are skipped.

    Args:
        path: a ``.jsonl`` or ``.parquet`` file, or a Hugging Face dataset; see `agentrl.data.hub.open_dataset`.
        key: the configuration key that names it, for messages.
        columns: of a parquet file or dataset, read only those of these names that it has: others may be large.

    Raises:
        ConfigError: there is no such file or dataset, its suffix says neither, or a row does not parse; the message has the
            place.
        MissingError: the extra for its format is not installed.

    """
    path = path.expanduser()
    if is_dataset(path):
        return _dataset(path, key, columns)
    check_file(path, key)
    if path.suffix == ".parquet":
        require("pyarrow", f"{key}={path}")
        return _parquet(path, key, columns)
    return _jsonl(path, key)


def check_file(path: Path, key: str) -> None:
    """Check that a file of rows exists, and that its suffix is that of a format.

    Raises:
        ConfigError: it does not, or is not.

    """
    if not path.is_file():
        raise ConfigError(f"{key}={path}: there is no such file (looked for {path.resolve()})")
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{key}={path}: rows are read from {' and '.join(SUFFIXES)} files, not from {path.suffix!r}")


def _jsonl(path: Path, key: str) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield parse_line(path, number, line, key)


def parse_line(path: Path, number: int, line: bytes, key: str) -> Row:
    """Return the row of a line of JSONL.

    Raises:
        ConfigError: it is no JSON object.

    """
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        shown = line[:_SHOWN].decode(errors="replace").rstrip()
        raise ConfigError(f"{path}, line {number} ({key}) is no JSON: {error}: {shown}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}, line {number} ({key}) must be a JSON object, and is a {type(values).__name__}: "
            f"{str(values)[:_SHOWN]}"
        )
    return Row(path, number, values)


def _parquet(path: Path, key: str, columns: Collection[str] | None) -> Iterator[Row]:
    from pyarrow import parquet

    with reading(f"{key}={path}", "parquet file"):
        number = 0
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            wanted = [name for name in names if columns is None or name in columns]
            unread = tuple(name for name in names if name not in wanted)
            for batch in file.iter_batches(batch_size=1024, columns=wanted):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(path, number, values, unread)


def _dataset(path: Path, key: str, columns: Collection[str] | None) -> Iterator[Row]:
    dataset, unread = open_dataset(path, key, columns)
    for index in range(len(dataset)):
        yield Row(path, index + 1, dataset[index], unread)
