"""Rows in their order of training, from files and from a hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from agentrl.config.tasks import DataConfig
from agentrl.core.background import run_in_daemon_thread
from agentrl.core.errors import ConfigError, DataError
from agentrl.core.reading import flatten_message
from agentrl.data.conversion import PIECE, Piece
from agentrl.data.hub import DatasetStream, open_stream
from agentrl.data.rows import Row, RowTable, describe_location

KEY = "data.path"


class StreamedRows(Protocol):
    """The rows of ``data.path`` in their order of training."""

    @property
    def size(self) -> int | None:
        """Number of rows; None: not known."""
        ...

    @property
    def table(self) -> RowTable | None:
        """Reads rows by number; None: pieces have the rows."""
        ...

    def pieces(self, seed: int, state: Mapping[str, Any]) -> Iterator[Piece]:
        """Return the rows after a state, without end; ``{"position": 0}`` is the first one."""
        ...

    def sample(self, most: int) -> list[Row]:
        """Return rows for checks."""
        ...


class TableRows:
    """Rows of a file or dataset on the disk: a new permutation of all of them every epoch."""

    def __init__(self, table: RowTable, size: int) -> None:
        self.table = table
        self.size = size

    def pieces(self, seed: int, state: Mapping[str, Any]) -> Iterator[Piece]:
        """Return numbers of rows; see `StreamedRows.pieces`."""
        first, start = divmod(state["position"], self.size)
        for epoch in count(first):
            order = np.random.default_rng([seed, epoch]).permutation(self.size)
            for begin in range(start, self.size, PIECE):
                state = {"position": epoch * self.size + begin}
                yield Piece(epoch, state, order[begin : begin + PIECE].tolist())
            start = 0

    def sample(self, most: int) -> list[Row]:
        """Return rows at even distances."""
        return [self.table[index] for index in range(0, self.size, -(-self.size // most))]


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows that are shuffled with each other."""

    epoch: int
    first: int
    """Number of rows of the epoch before it."""
    stream: dict[str, Any] | None
    """State of the dataset before it; None at its begin."""
    rows: list[Row]


class HubRows:
    """Rows of a dataset of the hub, in its order but for blocks of ``data.shuffle_buffer`` rows, each in a random order.

    A thread reads the next block. The state has that of the dataset before a block, so a resumed run reads the block again and
    none before it.
    """

    size = None
    table = None

    def __init__(self, path: Path, data: DataConfig, columns: set[str] | None) -> None:
        self._path = path
        self._data = data
        self._columns = columns
        self._first_rows, self._unread = self._open()

    def _open(self) -> tuple[DatasetStream, tuple[str, ...]]:
        return open_stream(self._path, KEY, self._columns)

    def pieces(self, seed: int, state: Mapping[str, Any]) -> Iterator[Piece]:
        """Return rows; see `StreamedRows.pieces`."""
        blocks = self._blocks(state.get("epoch", 0), state.get("first", 0), state.get("stream"))
        ahead, begin = run_in_daemon_thread(partial(next, blocks), "data"), state["position"]
        while True:
            block = ahead.result()
            ahead = run_in_daemon_thread(partial(next, blocks), "data")
            block_state = {"epoch": block.epoch, "first": block.first, "stream": block.stream}
            order = np.random.default_rng([seed, block.epoch, block.first]).permutation(len(block.rows)).tolist()
            for start in range(begin, len(order), PIECE):
                rows = [block.rows[index] for index in order[start : start + PIECE]]
                yield Piece(block.epoch, {**block_state, "position": start}, rows)
            begin = 0

    def _blocks(self, epoch: int, first: int, state: dict[str, Any] | None) -> Iterator[_Block]:
        stream, _ = self._open()
        while True:
            stream.load_state_dict(state)
            rows = self._read(stream, first)
            while block := list(islice(rows, self._data.shuffle_buffer)):
                yield _Block(epoch, first, state, block)
                first, state = first + len(block), stream.state_dict()
            if first == 0:
                raise ConfigError(f"{KEY}={self._path}: the dataset holds no rows")
            epoch, first, state = epoch + 1, 0, None

    def _read(self, stream: DatasetStream, first: int) -> Iterator[Row]:
        """Read the rows of an epoch from number ``first`` on, without those behind ``data.limit``."""
        number = first
        try:
            for number, values in enumerate(islice(stream, self._data.limit and self._data.limit - first), first + 1):
                yield Row(self._path, number, values, self._unread)
        except (OSError, ValueError, RuntimeError, LookupError, TypeError) as error:
            location = describe_location(self._path, number + 1)
            raise DataError(
                f"{location} ({KEY}) cannot be read: {type(error).__name__}: {flatten_message(error)}"
            ) from error

    def sample(self, most: int) -> list[Row]:
        """Return the first rows."""
        return list(islice(self._read(self._first_rows, 0), most))
