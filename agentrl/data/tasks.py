"""A taskset from the rows of files and datasets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from agentrl.config.schema import Config
from agentrl.config.tasks import DataConfig
from agentrl.core.errors import AgentrlError, ConfigError, unknown_name
from agentrl.core.task import Task, TaskSet
from agentrl.data.conversion import PromptLimit, RowConversion
from agentrl.data.row_table import open_table
from agentrl.data.row_workers import PIECE, OrderedRows, Piece, RowWorker
from agentrl.data.rows import place_of, read_rows
from agentrl.data.streams import TaskStream


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

    @classmethod
    def of_run(cls, config: Config) -> FileTasks:
        """Return the tasks of a configuration, which has the model that counts the tokens of prompts."""
        model, most = config.model, config.data.max_prompt_tokens
        limit = None if most is None else PromptLimit(most, model.path, model.trust_remote_code, config.render)
        return cls(config.data, limit)

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
    places: dict[str, str] = {}
    rows = 0
    for place, task in _converted(path, data, key, convert, workers):
        rows += 1
        if task is None:
            continue
        if task.id in tasks:
            raise ConfigError(
                f"{place}: {data.id_key!r} is {task.id!r}, as in {places[task.id]}; data.id_key must name rows"
            )
        tasks[task.id], places[task.id] = task, place
    if not rows:
        raise ConfigError(f"{key}={path}: the file holds no rows")
    if not tasks:
        raise ConfigError(f"{convert.filters}: all rows of {key}={path} are left out")
    return list(tasks.values())


def _converted(
    path: Path, data: DataConfig, key: str, convert: RowConversion, workers: int
) -> Iterator[tuple[str, Task | None]]:
    """Yield the place of each row, and its task; None: it is left out."""
    if not workers:
        for row in islice(read_rows(path, key), data.limit):
            yield row.place, convert(row)
        return
    table = open_table(path, key, convert.columns)
    size = min(len(table), data.limit or len(table))
    pieces = (Piece(0, {"position": start}, range(start, min(start + PIECE, size))) for start in range(0, size, PIECE))
    results = OrderedRows(path, pieces, RowWorker(table, convert), workers)
    try:
        for found in results:
            if isinstance(found.result, AgentrlError):
                raise found.result
            yield place_of(path, found.number), found.result
    finally:
        results.close()
