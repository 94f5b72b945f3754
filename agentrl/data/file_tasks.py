"""Tasks from the rows of files and datasets: all of them at the start, or as a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.config.tasks import DataConfig
from agentrl.core.background import run_in_daemon_thread
from agentrl.core.data_source import DataSource
from agentrl.core.errors import AgentrlError, ConfigError, DataError, unknown_name
from agentrl.core.reading import flatten_message
from agentrl.core.task import MadeTasks, Task, TaskSet, task_id
from agentrl.data.conversion import (
    PIECE,
    OrderedRows,
    Piece,
    PromptLimit,
    Result,
    RowConversion,
    RowFunction,
    RowWorker,
)
from agentrl.data.hub import PREFIX, DatasetStream, open_stream
from agentrl.data.rows import Row, RowTable, describe_location, open_table, read_rows

KEY = "data.path"


class TableRows:
    """Rows of a file or dataset on the disk: a new permutation of all of them every epoch."""

    def __init__(self, table: RowTable, size: int) -> None:
        self.table = table
        self.size = size

    def pieces(self, seed: int, state: Mapping[str, Any]) -> Iterator[Piece]:
        """Return numbers of rows after a state, without end; ``{"position": 0}`` is the first one."""
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

    size = table = None
    """Not known, and none: pieces have the rows."""

    def __init__(self, path: Path, data: DataConfig, columns: set[str] | None) -> None:
        self._path = path
        self._data = data
        self._columns = columns
        self._first_rows, self._unread = self._open()

    def _open(self) -> tuple[DatasetStream, tuple[str, ...]]:
        return open_stream(self._path, KEY, self._columns)

    def pieces(self, seed: int, state: Mapping[str, Any]) -> Iterator[Piece]:
        """Return the rows after a state, without end; see `TableRows.pieces`."""
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


class FileTasks(TaskSet):
    """The splits ``train`` (``data.path``) and ``eval`` (``data.eval_path``); without a file a split is empty.

    All rows are read and checked when it is built; with ``data.streaming`` those of ``data.path`` when their tasks are taken.

    Args:
        data: the ``data`` section.
        limit: on the tokens of prompts of ``data.path``.

    Raises:
        ConfigError: see `read_tasks`.
    """

    def __init__(self, data: DataConfig, limit: PromptLimit | None = None) -> None:
        convert = RowConversion(data, limit)
        self.stream: TaskStream | None = None
        """The split ``train``, with ``data.streaming``."""
        train: Sequence[Task] = ()
        if data.path is not None and data.streaming:
            self.stream = TaskStream(data.path, data, convert)
        elif data.path is not None:
            train = _read_all(data.path, data, "data.path", convert, data.workers)
        self._splits = {
            "train": train,
            "eval": read_tasks(data.eval_path, data, "data.eval_path") if data.eval_path is not None else (),
        }

    def split(self, name: str) -> Sequence[Task]:
        """Return the tasks of a file, in its order.

        Raises:
            UnknownNameError: the split is neither ``train`` nor ``eval``.
            ConfigError: it is read as a stream, and its tasks have no numbers.
        """
        if name not in self._splits:
            raise unknown_name("split", name, self._splits, "tasks.train_split, tasks.eval_split")
        if name == "train" and self.stream is not None:
            return self.stream.by_number("the split 'train'")
        return self._splits[name]


def read_tasks(path: Path, data: DataConfig, key: str = "data.path") -> Sequence[Task]:
    """Return the tasks in a file, one a row.

    Args:
        path: a ``.jsonl`` or ``.parquet`` file, or a Hugging Face dataset.
        data: columns of prompt, label and metadata, the conversion, and the limit of rows.
        key: the configuration key that names the file, for messages.

    Raises:
        ConfigError: there is no such file, nothing in it, or a row that does not parse, lacks a key or has a prompt
            or name that cannot be used; the message has the place.
    """
    return _read_all(path, data, key, RowConversion(data), 0)


def _read_all(path: Path, data: DataConfig, key: str, convert: RowConversion, workers: int) -> Sequence[Task]:
    tasks: dict[str, Task] = {}
    locations: dict[str, str] = {}
    row_count = 0
    for location, task in convert_all(path, data, key, convert, workers):
        row_count += 1
        if task is None:
            continue
        if task.id in tasks:
            raise ConfigError(
                f"{location}: {data.id_key!r} is {task.id!r}, as in {locations[task.id]}; data.id_key must name rows"
            )
        tasks[task.id], locations[task.id] = task, location
    if not row_count:
        raise ConfigError(f"{key}={path}: the file holds no rows")
    if not tasks:
        raise ConfigError(f"{convert.filters}: all rows of {key}={path} are left out")
    return list(tasks.values())


def convert_all(
    path: Path, data: DataConfig, key: str, convert: RowFunction[Result], workers: int
) -> Iterator[tuple[str, Result | None]]:
    """Yield the location of each row, and what ``convert`` returns for it; None if it is left out.

    Raises:
        ConfigError: there is no such file, or ``convert`` raises it.
        DataError: a worker process died.
    """
    if not workers:
        yield from (
            (row.location, convert(row)) for row in islice(read_rows(path, key, rows_key=data.rows_key), data.limit)
        )
        return
    table = open_table(path, key, convert.columns, data.rows_key)
    size = min(len(table), data.limit or len(table))
    pieces = (Piece(0, {"position": start}, range(start, min(start + PIECE, size))) for start in range(0, size, PIECE))
    results = OrderedRows(path, pieces, RowWorker(table, convert), workers)
    try:
        for row in results:
            if isinstance(row.result, AgentrlError):
                raise row.result
            yield describe_location(path, row.number), row.result
    finally:
        results.close()


class TaskStream:
    """The training tasks of ``data.path`` with ``data.streaming``: their rows are read and converted as they are taken."""

    def __init__(self, path: Path, data: DataConfig, convert: RowConversion) -> None:
        self.path = path
        self.convert = convert
        self._task_source = ""
        """In a mixed run the name with which ids begin."""
        self._data = data
        if str(path).startswith(PREFIX):
            self._rows: HubRows | TableRows = HubRows(path, data, convert.columns)
        else:
            table = open_table(path, KEY, convert.columns, data.rows_key)
            self._rows = TableRows(table, min(len(table), data.limit or len(table)))

    @property
    def size(self) -> int | None:
        """Number of rows; None: not known."""
        return self._rows.size

    def with_source(self, name: str) -> TaskStream:
        """Return the stream with ids that begin with the name of a task source."""
        stream = copy(self)
        stream._task_source = name
        return stream

    def sample(self, most: int) -> list[Task]:
        """Return some of the tasks, for checks.

        Raises:
            ConfigError: see `RowConversion`.
        """
        tasks = [self.convert(row) for row in self._rows.sample(most)]
        return [self.with_run_id(task) for task in tasks if task is not None]

    def with_run_id(self, task: Task) -> Task:
        """Return a task under its id in the run."""
        return replace(task, id=task_id(self._task_source, task.id)) if self._task_source else task

    def by_number(self, needed_by: str) -> Sequence[Task]:
        """Return the tasks by number.

        Raises:
            ConfigError: they have none; ``needed_by`` is the key with its value that needs it.
        """
        table, filters = self._rows.table, self.convert.filters
        if table is None or filters:
            reason = f"rows are left out by {filters}" if filters else f"{KEY}={self.path} is read in its order"
            raise ConfigError(
                f"{needed_by} needs tasks by number, but with data.streaming=true {reason}; set data.streaming=false"
            )
        assert self._rows.size is not None, "a table has a size"
        return _NumberedTasks(self, table, self._rows.size)

    def open(self, seed: int, state: Mapping[str, Any]) -> OrderedRows[Task]:
        """Start to read the rows after a state."""
        worker = RowWorker(self._rows.table, self.convert)
        return OrderedRows(self.path, self._rows.pieces(seed, state), worker, self._data.workers)


class _NumberedTasks(MadeTasks):
    """The tasks of rows by number."""

    def __init__(self, stream: TaskStream, table: RowTable, size: int) -> None:
        super().__init__("train", size)
        self._stream = stream
        self._table = table

    def make(self, index: int) -> Task:
        """Return the task of a row.

        Raises:
            ConfigError: the row does not parse, lacks a key or has a prompt that cannot be used.
        """
        task = self._stream.convert(self._table[index])
        assert task is not None, "by_number refuses a conversion that leaves out rows"
        return self._stream.with_run_id(task)


class StreamOrder(DataSource):
    """Takes the tasks of a stream: every row once an epoch, but those that are left out (``shuffled``)."""

    def __init__(self, stream: TaskStream, seed: int) -> None:
        super().__init__((), seed)
        self._stream = stream
        self._state: dict[str, Any] = {"position": 0}
        self._rows: OrderedRows[Task] | None = None
        self._epoch = -1
        """Epoch of the last task, or of the first row."""
        self._numbers: dict[str, int] = {}
        """Numbers of the rows of tasks that were taken."""
        self._left_out = 0

    def get_samples(self, num_samples: int) -> list[Task]:
        """Return the next tasks.

        Raises:
            ConfigError: a row cannot be used, two rows have one id, or all rows are left out.
            DataError: a worker process died, or a hub cannot be read.
        """
        return [self._take() for _ in range(num_samples)]

    def _take(self) -> Task:
        self._rows = self._rows or self._stream.open(self.seed, self._state)
        for row in self._rows:
            if isinstance(row.result, AgentrlError):
                raise row.result
            self._epoch = row.epoch if self._epoch < 0 else self._epoch
            self._state = row.state
            if row.result is not None:
                self._epoch = row.epoch
                return self._stream.with_run_id(self._check_id(row.result, row.number))
            self._left_out += 1
            if row.epoch > self._epoch + 1:
                raise ConfigError(f"{self._stream.convert.filters}: all rows of {KEY}={self._stream.path} are left out")
        raise AssertionError("rows have no end")

    def _check_id(self, task: Task, number: int) -> Task:
        """Return a task if no other row has its id."""
        if (first := self._numbers.setdefault(task.id, number)) != number:
            locations = " and ".join(describe_location(self._stream.path, row) for row in (first, number))
            raise ConfigError(f"data.id_key: {locations} have the id {task.id!r}; it must name rows")
        return task

    def state(self) -> dict[str, Any]:
        """Return the state of the stream after the last task."""
        return self._state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on after the last task."""
        assert self._rows is None, "the state is loaded before tasks are taken"
        self._state = dict(state)

    def metrics(self) -> dict[str, float]:
        """Return the number of rows that this process has left out."""
        return {"data/left_out": float(self._left_out)} if self._stream.convert.filters else {}

    def close(self) -> None:
        """End the worker processes."""
        if self._rows is not None:
            self._rows.close()
