"""A taskset from the rows of files and datasets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast, get_args

from agentrl.config.tasks import DataConfig
from agentrl.core.errors import ConfigError, unknown_name
from agentrl.core.task import MadeTasks, Task, TaskSet
from agentrl.core.types import Message, Role
from agentrl.data.row_table import open_table
from agentrl.data.rows import Row, read_rows

_ROLES = get_args(Role)


class FileTasks(TaskSet):
    """The splits ``train`` (``data.path``) and ``eval`` (``data.eval_path``); without a file a split is empty.

    All rows are read and checked when it is built; with ``data.streaming`` those of ``data.path`` when their tasks are taken.

    Raises:
        ConfigError: see `read_tasks`.

    """

    def __init__(self, data: DataConfig) -> None:
        self._splits: dict[str, Sequence[Task]] = {
            "train": () if data.path is None else _train_tasks(data.path, data),
            "eval": read_tasks(data.eval_path, data, "data.eval_path") if data.eval_path is not None else (),
        }

    def split(self, name: str) -> Sequence[Task]:
        """Return the tasks of a file, in its order.

        Raises:
            UnknownNameError: the split is neither ``train`` nor ``eval``.

        """
        if name not in self._splits:
            raise unknown_name("split", name, self._splits, "tasks.train_split, tasks.eval_split")
        return self._splits[name]


def _train_tasks(path: Path, data: DataConfig) -> Sequence[Task]:
    return StreamedTasks(path, data) if data.streaming else read_tasks(path, data)


class StreamedTasks(MadeTasks):
    """The tasks of ``data.path``, each read when it is taken."""

    def __init__(self, path: Path, data: DataConfig) -> None:
        columns = {data.input_key, data.label_key, data.metadata_key, data.id_key} - {None}
        self._rows = open_table(path, "data.path", cast("set[str]", columns))
        self._data = data
        super().__init__("train", min(len(self._rows), data.limit or len(self._rows)))

    def make(self, index: int) -> Task:
        """Return the task of a row.

        Raises:
            ConfigError: the row does not parse, lacks a key or has a prompt that cannot be used.

        """
        return _task(self._rows[index], self._data)


def read_tasks(path: Path, data: DataConfig, key: str = "data.path") -> Sequence[Task]:
    """Return the tasks in a file, one a row.

    Args:
        path: a ``.jsonl`` or ``.parquet`` file, or a Hugging Face dataset.
        data: columns of prompt, label and metadata, and the limit of rows.
        key: the configuration key that names the file, for messages.

    Raises:
        ConfigError: there is no such file, nothing in it, or a row that does not parse, lacks a key or has a prompt
            or name that cannot be used; the message has the place.

    """
    tasks: dict[str, Task] = {}
    places: dict[str, str] = {}
    for row in islice(read_rows(path, key), data.limit):
        task = _task(row, data)
        if task.id in tasks:
            raise ConfigError(
                f"{row.place}: {data.id_key!r} is {task.id!r}, as in {places[task.id]}; data.id_key must name rows"
            )
        tasks[task.id], places[task.id] = task, row.place
    if not tasks:
        raise ConfigError(f"{key}={path}: the file holds no rows")
    return list(tasks.values())


def _task(row: Row, data: DataConfig) -> Task:
    name = f"{row.path.name}:{row.number}" if data.id_key is None else str(row.get(data.id_key, "data.id_key"))
    return Task(
        id=name,
        prompt=_prompt(row, data),
        answer=None if data.label_key is None else _json_able(row, data.label_key, "data.label_key"),
        metadata={} if data.metadata_key is None else _metadata(row, data.metadata_key),
    )


def _prompt(row: Row, data: DataConfig) -> tuple[Message, ...]:
    prompt = row.get(data.input_key, "data.input_key")
    where = f"{row.place}: {data.input_key!r} (data.input_key)"
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ConfigError(f"{where} is an empty text")
        return (Message("user", prompt, inline=not data.apply_chat_template),)
    if not data.apply_chat_template:
        raise ConfigError(
            f"{where} is a {type(prompt).__name__}; with data.apply_chat_template=false a prompt is one text"
        )
    if not isinstance(prompt, list) or not prompt:
        shown = f"{prompt!r:.80}"
        raise ConfigError(f"{where} must be a text or a list of messages {{role, content}}, and is {shown}")
    return tuple(_message(said, f"{where}, message {number}") for number, said in enumerate(prompt, 1))


def _message(said: Any, where: str) -> Message:
    if not isinstance(said, Mapping):
        raise ConfigError(f"{where} must be {{role, content}}, and is {said!r:.80}")
    role, content = said.get("role"), said.get("content")
    if role not in _ROLES:
        raise ConfigError(f"{where} has the role {role!r}; roles are {', '.join(_ROLES)}")
    if not isinstance(content, str):
        raise ConfigError(f"{where} has the content {content!r:.80}, which must be a text")
    more = sorted(key for key, value in said.items() if value is not None and key not in {"role", "content"})
    if more:
        raise ConfigError(f"{where} has {', '.join(more)}, which a prompt of role and content cannot say")
    return Message(cast(Role, role), content)


def _metadata(row: Row, column: str) -> Mapping[str, Any]:
    if column in row.values and row.values[column] is None:  # parquet's way to leave a cell empty
        return {}
    value = _json_able(row, column, "data.metadata_key")
    if not isinstance(value, Mapping):
        raise ConfigError(f"{row.place}: {column!r} (data.metadata_key) must be a mapping, and is {value!r:.80}")
    return value


def _json_able(row: Row, column: str, key: str) -> Any:
    """Return a value that can be written to JSON; parquet has others too, such as dates."""
    value = row.get(column, key)
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{row.place}: {column!r} ({key}) cannot be written as JSON: {error}") from None
    return value
