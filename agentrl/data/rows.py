"""Rows of JSONL, JSON, CSV and parquet files, of Hugging Face datasets and of folders of container tasks: one after the other,
or by number.

Rows of JSONL and parquet files and of datasets are read from disk on access.
"""

from __future__ import annotations

import csv
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from agentrl.containers.task_folder import find_task_folders, is_task_folder
from agentrl.core.errors import ConfigError
from agentrl.core.extras import require
from agentrl.core.reading import reading
from agentrl.data.hub import PREFIX, is_dataset, open_dataset, split_columns
from agentrl.data.row_images import IMAGE_KEY, RowImages
from agentrl.data.task_folders import read_task_folder

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
"""Formats of files; `agentrl.data.hub` has the others."""
_SHOWN = 80
_CHUNK = 1 << 24
"""Bytes that are searched for the ends of lines at a time."""
_SHORT = 16
"""Lines of so many bytes may be empty."""


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
    def is_task_folder(self) -> bool:
        """Whether the row is the folder of a container task."""
        return is_task_folder(self.path)

    @property
    def location(self) -> str:
        """Path and number, for messages. Example: ``train.jsonl, line 17``. Of a task's folder its path."""
        return str(self.path) if self.is_task_folder else describe_location(self.path, self.number)

    def get(self, column: str, key: str) -> Any:
        """Return the value of ``column``, which the configuration key ``key`` names.

        Without a column of this name, ``a.b`` is the value ``b`` in the mapping ``a``.

        Raises:
            ConfigError: the row has no such column, or nothing in it.
        """
        value: Any = self.values
        names = [column] if column in self.values else column.split(".")
        for depth, name in enumerate(names):
            value = self._parse_cell(value)
            if not isinstance(value, Mapping) or value.get(name) is None:
                fault = "is null" if isinstance(value, Mapping) and name in value else "is missing"
                owner = repr(".".join(names[:depth])) if depth else "the row"
                has = ", ".join(map(str, value if depth else self.columns)) if isinstance(value, Mapping) else "none"
                raise ConfigError(
                    f"{self.location}: {column!r} ({key}={column}) {fault}; {owner} has the keys: {has or 'none'}"
                )
            value = value[name]
        return value

    def get_parsed(self, column: str, key: str) -> object:
        """Return the value of ``column`` as `get` does; a list or an object that a cell of a CSV file has as JSON is parsed."""
        return self._parse_cell(self.get(column, key))

    def find(self, column: str) -> object:
        """Return the value of ``column`` as `get` does; None if the row has no such column, or nothing in it."""
        try:
            return self.get(column, "")
        except ConfigError:
            return None

    def images(self, column: str | None) -> RowImages:
        """Return what places images in the row's messages.

        Args:
            column: of images (``data.image_key``); None: messages have their own images alone.

        Raises:
            ConfigError: the row has no such column, or an image in it cannot be read.
        """
        folder = self.path if is_dataset(self.path) and self.path.is_dir() else self.path.parent
        base = None if str(self.path).startswith(PREFIX) else folder
        value = None
        if column is not None and (column not in self.values or self.values[column] not in (None, "")):
            value = self.get_parsed(column, IMAGE_KEY)
        sources = [] if value is None else value if isinstance(value, list | tuple) else [value]
        return RowImages(self.location, base, self.columns, column, sources)

    def _parse_cell(self, value: object) -> object:
        if self.path.suffix != ".csv" or not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
            return value
        try:
            parsed: object = json.loads(value)
        except (ValueError, RecursionError):
            return value
        return parsed

    def without_fill(self, value: object) -> object:
        """Return a value without the nulls with which formats with columns fill up mappings of different keys."""
        return _without_nulls(value) if self.path.suffix == ".parquet" or is_dataset(self.path) else value


def _without_nulls(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def describe_location(path: Path, number: int) -> str:
    """Return path and number of a row, for messages. Example: ``train.jsonl, line 17``."""
    return f"{path}, {'line' if path.suffix == '.jsonl' else 'row'} {number}"


def read_rows(
    path: Path, key: str, columns: Collection[str] | None = None, rows_key: str | None = None
) -> Iterator[Row]:
    """Yield the rows of a file or dataset; empty lines of JSONL are skipped.

    Args:
        path: a file with one of `SUFFIXES`, or a Hugging Face dataset; see `agentrl.data.hub.open_dataset`.
        key: the configuration key that names it, for messages.
        columns: of a parquet file or dataset, read only those of these names that it has: others may be large.
        rows_key: of a ``.json`` file with one object, the key of its list of rows; see ``data.rows_key``.

    Raises:
        ConfigError: there is no such file or dataset, its suffix says neither, or a row does not parse; the message has the
            place.
        MissingError: the extra for its format is not installed.
    """
    path = path.expanduser()
    if folders := find_task_folders(path):
        table = TaskFolderTable(folders)
        return (table[index] for index in range(len(table)))
    if is_dataset(path):
        dataset = DatasetTable(path, key, columns)
        return (dataset[index] for index in range(len(dataset)))
    check_file(path, key)
    if path.suffix == ".parquet":
        require("pyarrow", f"{key}={path}")
        return _parquet(path, key, columns)
    if _is_read_whole(path, rows_key):
        return iter(_read_whole(path, key, rows_key))
    return _jsonl(path, key)


def check_file(path: Path, key: str) -> None:
    """Check that a file of rows exists, and that its suffix is that of a format.

    Raises:
        ConfigError: it does not, or is not.
    """
    if not path.is_file():
        raise ConfigError(f"{key}={path}: there is no such file (looked for {path.resolve()})")
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{key}={path}: rows are read from {', '.join(SUFFIXES)} files, not from {path.suffix!r}")


def _is_read_whole(path: Path, rows_key: str | None) -> bool:
    """Return whether a file has no rows that can be read one by one. A ``.json`` file may have lines, as JSONL has."""
    if path.suffix != ".json" or rows_key is not None:
        return path.suffix in (".csv", ".json")
    with path.open("rb") as file:
        return file.read(_SHOWN).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _read_whole(path: Path, key: str, rows_key: str | None) -> list[Row]:
    """Return the rows of a ``.json`` file with a list of objects, or of a ``.csv`` file, whose values are texts."""
    with reading(f"{key}={path}", f"{path.suffix} file"), path.open(encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".json":
            source = file.read()
            rows = _rows_in(json.loads(source, object_pairs_hook=_mapping), path, key, rows_key)
            _check_texts(source, rows)
        else:
            csv.field_size_limit(sys.maxsize)
            try:
                reader = csv.DictReader(file, restkey="", strict=True)
                rows = list(reader)
            except csv.Error as error:
                raise ConfigError(f"{path}, line {reader.line_num} ({key}) is no CSV: {error}") from None
            twice = [name for name, count in Counter(reader.fieldnames or ()).items() if count > 1]
            if twice:
                raise ConfigError(f"{path} ({key}) has several columns {twice[0]!r}; rename or remove all but one")
    for number, values in enumerate(rows, 1):
        if not isinstance(values, dict):
            raise ConfigError(f"{path}, row {number} ({key}) must be a JSON object, and is {str(values)[:_SHOWN]!r}")
        if path.suffix == ".csv" and isinstance(values.get(""), list):
            raise ConfigError(f"{path}, row {number} ({key}) has more values than there are columns: {values['']}")
    return [Row(path, number, values) for number, values in enumerate(rows, 1)]


def _rows_in(value: object, path: Path, key: str, rows_key: str | None) -> list[Any]:
    """Return the list of rows in the value of a ``.json`` file: the value itself, or what is behind ``rows_key``."""
    for name in rows_key.split(".") if rows_key is not None and isinstance(value, Mapping) else ():
        if not isinstance(value, Mapping) or name not in value:
            keys = ", ".join(map(str, value)) if isinstance(value, Mapping) else ""
            raise ConfigError(f"data.rows_key={rows_key}: {key}={path} has no {name!r}; there are: {keys or 'no keys'}")
        value = value[name]
    if not isinstance(value, list):
        raise ConfigError(f"data.rows_key={rows_key}: in {key}={path} it is {value!r:.80}, and no list of rows")
    return value


def _mapping(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object of JSON; `ValueError` if it has a key several times, of which Python would keep the last."""
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"an object has the key {twice!r} several times; rename or remove all but one")
    return values


def _check_texts(source: str, value: object) -> None:
    """Check that the texts of a value in JSON can be encoded in UTF-8; `ValueError` if not."""
    if "\\ud" in source.lower():  # a half of a surrogate pair may be alone
        json.dumps(value, ensure_ascii=False).encode()


def _jsonl(path: Path, key: str) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if len(line) > _SHORT or line.strip():  # as `JsonlTable` counts lines
                yield parse_line(path, number, line, key)


def parse_line(path: Path, number: int, line: bytes, key: str) -> Row:
    """Return the row of a line of JSONL.

    Raises:
        ConfigError: it is no JSON object.
    """
    try:
        values = json.loads(line, object_pairs_hook=_mapping)
        _check_texts(line.decode(errors="replace"), values)
    except (ValueError, RecursionError) as error:
        shown = line[:_SHOWN].decode(errors="replace").rstrip()
        hint = "; data.rows_key names the list of rows in a file with one object" if path.suffix == ".json" else ""
        raise ConfigError(f"{path}, line {number} ({key}) is no JSON: {error}: {shown}{hint}") from None
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
            names, unread = split_columns(file.schema_arrow.names, columns)
            for batch in file.iter_batches(batch_size=1024, columns=names):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(path, number, values, unread)


class RowTable(Protocol):
    """Rows by number, from 0. Worker processes get a copy by `pickle`."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, index: int) -> Row:
        """Return a row; several threads may read."""


def open_table(path: Path, key: str, columns: Collection[str] | None, rows_key: str | None = None) -> RowTable:
    """Return the rows of a file or dataset. A JSONL file is read once, for the places of its lines; so is a parquet file.

    Args:
        path: as for `read_rows`.
        key: the configuration key that names it, for messages.
        columns: of formats with columns, read only those of these names that it has; None: all.
        rows_key: see `read_rows`.

    Raises:
        ConfigError: there is no such file or dataset, it cannot be read, or it is empty.
        MissingError: a package for it is not installed.
    """
    path = path.expanduser()
    if folders := find_task_folders(path):
        return TaskFolderTable(folders)
    if is_dataset(path):
        table: RowTable = DatasetTable(path, key, columns)
    else:
        check_file(path, key)
        stat = path.stat()
        names = None if columns is None else frozenset(columns)
        table = _open_file(path, key, names, rows_key, stat.st_size, stat.st_mtime_ns)
    if len(table) == 0:
        raise ConfigError(f"{key}={path}: the file holds no rows")
    return table


@lru_cache(maxsize=4)
def _open_file(
    path: Path, key: str, columns: frozenset[str] | None, rows_key: str | None, size: int, changed: int
) -> RowTable:
    """Return the rows of a file of this size and time of change. Several parts of a command open it."""
    if path.suffix == ".parquet":
        return ParquetTable(path, key, columns)
    return _read_whole(path, key, rows_key) if _is_read_whole(path, rows_key) else JsonlTable(path, key)


class JsonlTable:
    """The lines of a JSONL file without empty ones. Memory has 8 bytes a line."""

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self._key = key
        self._file = path.open("rb")
        self._edges = _line_edges(self._file.fileno())
        filled = np.diff(self._edges) > _SHORT
        for line in np.flatnonzero(~filled).tolist():
            filled[line] = bool(self._read(line).strip())
        self._lines = None if filled.all() else np.flatnonzero(filled)
        """Numbers of the lines that are not empty, if some are."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker process gets: it opens the file again."""
        return self.__dict__ | {"_file": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the file."""
        self.__dict__ |= state | {"_file": state["_path"].open("rb")}

    def __len__(self) -> int:
        """Return the number of lines."""
        return len(self._edges) - 1 if self._lines is None else len(self._lines)

    def __getitem__(self, index: int) -> Row:
        """Return the row of a line.

        Raises:
            ConfigError: it is no JSON object.
        """
        line = index if self._lines is None else int(self._lines[index])
        return parse_line(self._path, line + 1, self._read(line), self._key)

    def _read(self, line: int) -> bytes:
        start, end = (int(edge) for edge in self._edges[line : line + 2])
        return os.pread(self._file.fileno(), end - start, start)


def _line_edges(fd: int) -> NDArray[np.int64]:
    """Return where lines begin, and where the last one ends."""
    size, edges = os.fstat(fd).st_size, [np.zeros(1, np.int64)]
    for start in range(0, size, _CHUNK):
        data = np.frombuffer(os.pread(fd, _CHUNK, start), np.uint8)
        edges.append(np.flatnonzero(data == ord("\n")) + (start + 1))
    line_edges = np.concatenate(edges)
    return line_edges if line_edges[-1] == size else np.append(line_edges, size)


class ParquetTable:
    """The rows of a parquet file, whose columns are copied to a temporary file that is memory-mapped.

    A row of a parquet file can be read only with all rows of its row group.
    """

    def __init__(self, path: Path, key: str, columns: Collection[str] | None) -> None:
        require("pyarrow", f"{key}={path}")
        import pyarrow as pa
        from pyarrow import parquet

        self._path = path
        sizes = [0]
        with (
            reading(f"{key}={path}", "parquet file"),
            parquet.ParquetFile(path, pre_buffer=False, buffer_size=_CHUNK) as file,
        ):
            schema = file.schema_arrow
            names, self._unread = split_columns(schema.names, columns)
            if not names:
                names, self._unread = schema.names, ()
            with tempfile.NamedTemporaryFile(prefix="agentrl-rows-") as copy:
                with pa.ipc.new_file(copy.name, pa.schema([schema.field(name) for name in names])) as writer:
                    for batch in file.iter_batches(batch_size=1024, columns=names):
                        writer.write_batch(batch)
                        sizes.append(batch.num_rows)
                self._file: Any = os.fdopen(os.open(copy.name, os.O_RDONLY), "rb")  # keeps the deleted file
                self._reader = pa.ipc.open_file(pa.memory_map(copy.name))
        pa.default_memory_pool().release_unused()  # what row groups were decoded in
        self._starts = np.cumsum(sizes)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker process gets when it is started: it maps the same file."""
        return self.__dict__ | {"_reader": None, "_file": DupFd(self._file.fileno())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map the file."""
        import pyarrow as pa

        self.__dict__ |= state
        self._file = os.fdopen(state["_file"].detach(), "rb")
        self._reader = pa.ipc.open_file(pa.memory_map(f"/dev/fd/{self._file.fileno()}"))

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Row:
        """Return a row.

        Raises:
            ConfigError: it has a text that is not in UTF-8.
        """
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        batch = self._reader.get_batch(number).slice(index - int(self._starts[number]), 1)
        with reading(describe_location(self._path, index + 1), "row of a parquet file"):
            values: Mapping[str, Any] = batch.to_pylist()[0]
        return Row(self._path, index + 1, values, self._unread)


class TaskFolderTable:
    """Folders of container tasks, which are read on access."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    def __len__(self) -> int:
        """Return the number of tasks."""
        return len(self._folders)

    def __getitem__(self, index: int) -> Row:
        """Return the row of a task.

        Raises:
            ConfigError: it cannot be used.
        """
        return Row(self._folders[index], index + 1, read_task_folder(self._folders[index]))


class DatasetTable:
    """The rows of a Hugging Face dataset, which ``datasets`` memory-maps."""

    def __init__(self, path: Path, key: str, columns: Collection[str] | None) -> None:
        self._path = path
        self._dataset, self._unread = open_dataset(path, key, columns)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._dataset)

    def __getitem__(self, index: int) -> Row:
        """Return a row."""
        return Row(self._path, index + 1, self._dataset[index], self._unread)
