"""Rows of large files and datasets by number, read from disk on access."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping
from functools import lru_cache
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from agentrl.core.errors import ConfigError
from agentrl.core.extras import require
from agentrl.core.reading import reading
from agentrl.data.hub import is_dataset, open_dataset
from agentrl.data.rows import Row, check_file, parse_line

_CHUNK = 1 << 24
"""Bytes that are searched for the ends of lines at a time."""
_SHORT = 16
"""Lines of so many bytes may be empty."""


class RowTable(Protocol):
    """Rows by number, from 0. Worker processes get a copy by `pickle`."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __getitem__(self, index: int) -> Row:
        """Return a row; several threads may read."""
        ...


def open_table(path: Path, key: str, columns: Collection[str] | None) -> RowTable:
    """Return the rows of a file or dataset. A JSONL file is read once, for the places of its lines; so is a parquet file.

    Args:
        path: as for `agentrl.data.rows.read_rows`.
        key: the configuration key that names it, for messages.
        columns: of formats with columns, read only those of these names that it has; None: all.

    Raises:
        ConfigError: there is no such file or dataset, it cannot be read, or it is empty.
        MissingError: a package for it is not installed.

    """
    path = path.expanduser()
    if is_dataset(path):
        table: RowTable = DatasetTable(path, key, columns)
    else:
        check_file(path, key)
        found = path.stat()
        table = _open_file(path, key, None if columns is None else frozenset(columns), found.st_size, found.st_mtime_ns)
    if len(table) == 0:
        raise ConfigError(f"{key}={path}: the file holds no rows")
    return table


@lru_cache(maxsize=4)
def _open_file(path: Path, key: str, columns: frozenset[str] | None, size: int, changed: int) -> RowTable:
    """Return the rows of a file of this size and time of change. Several parts of a command open it."""
    return ParquetTable(path, key, columns) if path.suffix == ".parquet" else JsonlTable(path, key)


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
    found = np.concatenate(edges)
    return found if found[-1] == size else np.append(found, size)


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
            wanted = [name for name in schema.names if columns is None or name in columns] or schema.names
            self._unread = tuple(name for name in schema.names if name not in wanted)
            with tempfile.NamedTemporaryFile(prefix="agentrl-rows-") as copy:
                with pa.ipc.new_file(copy.name, pa.schema([schema.field(name) for name in wanted])) as writer:
                    for batch in file.iter_batches(batch_size=1024, columns=wanted):
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
        """Return a row."""
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        batch = self._reader.get_batch(number).slice(index - int(self._starts[number]), 1)
        values: Mapping[str, Any] = batch.to_pylist()[0]
        return Row(self._path, index + 1, values, self._unread)


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
