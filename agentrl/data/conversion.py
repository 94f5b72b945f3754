"""Rows of data to tasks, in this process or in worker processes: conversion, columns of ``data``, limit on prompts."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast, get_args

from agentrl.config.model import ModelConfig, RenderConfig
from agentrl.config.tasks import DataConfig
from agentrl.core.child_process import init_worker_process, worker_processes
from agentrl.core.errors import AgentrlError, ConfigError, ConversationError, DataError, unknown_name
from agentrl.core.imports import is_reference, load_object
from agentrl.core.task import Task
from agentrl.core.types import THINK, THINK_END, Message, Role, ToolCall
from agentrl.core.user_code import calling
from agentrl.data.row_formats import CONVERSIONS
from agentrl.data.row_images import RowImages
from agentrl.data.rows import Row, RowTable, describe_location
from agentrl.data.task_folders import ID, METADATA
from agentrl.obs.waiting import waiting

if TYPE_CHECKING:
    from agentrl.render.renderer import ChatRenderer

_ROLES = get_args(Role)
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of reasoning in messages of OpenAI, vLLM and Harmony."""
_FIELDS = ("role", "content", *_REASONING, "tool_calls", "tool_call_id")
_IGNORED = {("name", "tool"), ("weight", "assistant")}
"""Further fields, with the role that has them: the name of a tool, which its call has, and what `untrained_messages` reads."""
PIECE = 16
"""Rows that a worker process gets at a time."""


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """``data.max_prompt_tokens``, with what counts the tokens."""

    tokens: int
    """Most tokens of a prompt."""
    model: ModelConfig
    """The ``model`` section."""
    render: RenderConfig
    """The ``render`` section."""

    def renderer(self) -> ChatRenderer:
        """Return the renderer of the policy's tokenizer; a model of the hub is downloaded."""
        from agentrl.models.resolve import resolve_model
        from agentrl.render.registry import load_renderer

        model = resolve_model(self.model.path)
        return load_renderer(model, self.render, trust_remote_code=self.model.trust_remote_code)


Result = TypeVar("Result")
_Result_co = TypeVar("_Result_co", covariant=True)


class RowFunction(Protocol[_Result_co]):
    """A function of rows. Worker processes get a copy."""

    @property
    def columns(self) -> set[str] | None:
        """The columns that are read; None: all."""
        ...

    def __call__(self, row: Row) -> _Result_co | None:
        """Return the result of a row; None if it is left out."""
        ...


class RowConversion:
    """Makes a task of a row, or leaves out one whose prompt has more tokens than ``limit``. Worker processes get a copy."""

    def __init__(self, data: DataConfig, limit: PromptLimit | None = None) -> None:
        self._data = data
        self._limit = limit
        self._function: Callable[[dict[str, Any]], Any] | None = None
        self._renderer: ChatRenderer | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without what a worker process loads for itself."""
        return RowConversion, (self._data, self._limit)

    @property
    def columns(self) -> set[str] | None:
        """The columns that are read; None: all, because a conversion may read any."""
        data = self._data
        if data.convert is not None:
            return None
        keys = filter(None, (data.input_key, data.image_key, data.label_key, data.metadata_key, data.id_key))
        return with_parents(keys)

    @property
    def filters(self) -> str:
        """The keys with which rows may be left out; empty if none is."""
        data = self._data
        convert = data.convert if data.convert not in CONVERSIONS else None
        keys = {"data.convert": convert, "data.max_prompt_tokens": self._limit and self._limit.tokens}
        return " and ".join(f"{key}={value}" for key, value in keys.items() if value is not None)

    def __call__(self, row: Row) -> Task | None:
        """Return the task of a row; None if it is left out.

        Raises:
            ConfigError: the conversion raises, or the row lacks a key or has a prompt that cannot be used.
        """
        converted = self.convert(row)
        if converted is None:
            return None
        task = make_task(converted, self._data)
        return None if self._limit is not None and self._is_long(converted, task, self._limit) else task

    def convert(self, row: Row) -> Row | None:
        """Return what ``data.convert`` makes of a row; without one the row.

        Raises:
            ConfigError: the conversion raises.
        """
        reference = self._data.convert
        if reference is None:
            return row
        call = f"data.convert={reference}"
        if self._function is None:
            if not is_reference(reference) and reference not in CONVERSIONS:
                raise unknown_name("conversion", reference, CONVERSIONS, "data.convert")
            self._function = CONVERSIONS.get(reference) or load_object(reference, "data.convert")
            if not callable(self._function):
                raise ConfigError(f"{call} is {self._function!r:.100}, and no function")
        with calling(f"{row.location}: {call}"):
            values = self._function(dict(row.values))
        if values is not None and not isinstance(values, Mapping):
            raise ConfigError(
                f"{row.location}: {call} must return a row as a mapping, or None to leave it out; it returned {values!r:.80}"
            )
        return None if values is None else replace(row, values=values, unread=())

    def _is_long(self, row: Row, task: Task, limit: PromptLimit) -> bool:
        self._renderer = self._renderer or limit.renderer()
        try:
            return len(self._renderer.render(task.prompt, ()).token_ids) > limit.tokens
        except ConversationError as error:
            raise ConfigError(f"{row.location}: the chat format refuses the prompt: {error}") from error


def with_parents(keys: Iterable[str]) -> set[str]:
    """Return the columns in which the values of keys may be: of ``a.b`` this name and ``a``."""
    return {name for key in keys for name in (key, key.partition(".")[0])}


def make_task(row: Row, data: DataConfig) -> Task:
    """Return the task of a row.

    Raises:
        ConfigError: it lacks a key, or has a prompt that cannot be used.
    """
    id_key, metadata_key = data.id_key, data.metadata_key
    if row.is_task_folder:
        id_key, metadata_key = id_key or ID, metadata_key or METADATA
    name = f"{row.path.name}:{row.number}" if id_key is None else str(row.get(id_key, "data.id_key"))
    return Task(
        id=name,
        prompt=make_prompt(row, data),
        answer=None if data.label_key is None else _json_able(row, data.label_key, "data.label_key", allow_nan=False),
        metadata={} if metadata_key is None else _metadata(row, metadata_key),
    )


def make_prompt(row: Row, data: DataConfig) -> tuple[Message, ...]:
    """Return the messages of the column ``data.input_key``.

    Raises:
        ConfigError: the row lacks it, or it cannot be used.
    """
    prompt = row.get(data.input_key, "data.input_key")
    where = f"{row.location}: {data.input_key!r} (data.input_key)"
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ConfigError(f"{where} is an empty text")
        if not data.apply_chat_template:
            return (Message("user", prompt, inline=True),)
        if _messages_of_text(prompt) is None:
            row_images = row.images(data.image_key)
            text, images = row_images.read_text(prompt, where)
            return row_images.place_all((Message("user", text, images=images),), where)
    elif not data.apply_chat_template:
        raise ConfigError(
            f"{where} is a {type(prompt).__name__}; with data.apply_chat_template=false a prompt is one text"
        )
    return make_messages(row, data.input_key, "data.input_key", data.image_key)


def make_messages(row: Row, column: str, key: str, image_column: str | None = None) -> tuple[Message, ...]:
    """Return the messages of a column, in the format of OpenAI, also as JSON text.

    Args:
        row: of the file.
        column: its column.
        key: the configuration key that names the column, for messages.
        image_column: the column of the images that the messages have places for (``data.image_key``).

    Raises:
        ConfigError: the row lacks it, or it has no messages, or a message or image that cannot be used.
    """
    value, where = row.get(column, key), f"{row.location}: {column!r} ({key})"
    messages = _messages_of_text(value) if isinstance(value, str) else value
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where} must be a text or a list of messages {{role, content}}, and is {value!r:.80}")
    clean = _as_it_is if isinstance(value, str) else row.without_fill
    row_images = row.images(image_column)
    made = (
        _message(message, f"{where}, message {number}", clean, row_images) for number, message in enumerate(messages, 1)
    )
    return row_images.place_all(tuple(made), where)


def _as_it_is(value: object) -> object:
    """Return a value of JSON text, whose nulls the text has."""
    return value


def untrained_messages(row: Row, column: str, key: str) -> frozenset[int]:
    """Return the indices of the messages of a column that have ``weight: 0``, as in OpenAI's files for fine-tuning.

    Raises:
        ConfigError: a weight is neither 0 nor 1.
    """
    value = row.get(column, key)
    messages = _messages_of_text(value) if isinstance(value, str) else value
    weights = {
        index: message["weight"]
        for index, message in enumerate(messages or ())
        if isinstance(message, Mapping) and message.get("weight") is not None
    }
    for index, weight in weights.items():
        if weight not in (0, 1):
            raise ConfigError(
                f"{row.location}: {column!r} ({key}), message {index + 1} has the weight {weight!r:.40}; it is 0, not "
                "trained, or 1"
            )
    return frozenset(index for index, weight in weights.items() if weight == 0)


def _messages_of_text(text: str) -> list[Any] | None:
    """Return the messages of a JSON text, as columns of text hold them; None if it is another text."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    are_messages = isinstance(value, list) and all(isinstance(item, dict) and "role" in item for item in value)
    return value if value and are_messages else None


def _message(message: Any, where: str, clean: Callable[[object], object], row_images: RowImages) -> Message:
    if not isinstance(message, Mapping):
        raise ConfigError(f"{where} must be {{role, content}}, and is {message!r:.80}")
    role, (content, images) = message.get("role"), row_images.read_content(message.get("content"), where)
    if role not in _ROLES:
        raise ConfigError(f"{where} has the role {role!r}; roles are {', '.join(_ROLES)}")
    calls = tuple(_call(call, where, clean) for call in message.get("tool_calls") or ())
    thoughts = [message[name] for name in _REASONING if message.get(name)]
    if content is None and (calls or thoughts):
        content = ""
    if not isinstance(content, str):
        raise ConfigError(f"{where} has the content {content!r:.80}, which must be a text")
    if (calls or thoughts) and role != "assistant":
        what = "tool_calls" if calls else "reasoning"
        raise ConfigError(f"{where} has the role {role!r} and {what}, which only an assistant makes")
    call_id = message.get("tool_call_id")
    more = sorted(key for key, value in message.items() if value not in (None, [], "") and key not in _FIELDS)
    more = [key for key in more if (key, role) not in _IGNORED]
    if more:
        raise ConfigError(f"{where} has {', '.join(more)}; a message has {', '.join(_FIELDS)}")
    if thoughts:
        content = _with_reasoning(thoughts, content, where)
    return Message(cast(Role, role), content, calls, None if call_id is None else str(call_id), images=images)


def _with_reasoning(thoughts: Sequence[Any], content: str, where: str) -> str:
    if len(thoughts) > 1 or not isinstance(thoughts[0], str) or THINK_END in content:
        raise ConfigError(
            f"{where} has its reasoning twice, or not as a text: give it as one of {', '.join(_REASONING)}, or in "
            f"{THINK} in the content"
        )
    return f"{THINK}\n{thoughts[0].strip()}\n{THINK_END}\n\n{content}"


def _call(call: Any, where: str, clean: Callable[[object], object]) -> ToolCall:
    """Return a call in the format of OpenAI: ``{"id", "function": {"name", "arguments"}}``, arguments as object or text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    arguments: Any = function.get("arguments") if isinstance(function, Mapping) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            name = None
    elif isinstance(arguments, Mapping):
        arguments = clean(arguments)
    if not isinstance(name, str) or not isinstance(arguments, Mapping | None):
        raise ConfigError(
            f"{where} has the tool call {call!r:.120}, which must be {{id, function: {{name, arguments}}}} with arguments as JSON"
        )
    return ToolCall(str(call.get("id") or ""), name, dict(arguments or {}))


def _metadata(row: Row, column: str) -> Mapping[str, Any]:
    if column in row.values and row.values[column] is None:  # parquet's way to leave a cell empty
        return {}
    value = _json_able(row, column, "data.metadata_key")
    if not isinstance(value, Mapping):
        raise ConfigError(f"{row.location}: {column!r} (data.metadata_key) must be a mapping, and is {value!r:.80}")
    return value


def _json_able(row: Row, column: str, key: str, *, allow_nan: bool = True) -> Any:
    """Return a value that can be written to JSON; parquet has others too, such as dates. No answer equals a label that is NaN."""
    value = row.get_parsed(column, key)
    try:
        json.dumps(value, allow_nan=allow_nan)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{row.location}: {column!r} ({key}) cannot be written as JSON: {error} ({value!r:.80})"
        ) from None
    return value


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows that follow each other in the order of a stream."""

    epoch: int
    """How often all rows came before."""
    begin: dict[str, Any]
    """State of the stream before the piece; ``position`` counts rows."""
    rows: Sequence[int | Row]
    """Numbers of rows in the table, or rows."""


@dataclass(frozen=True, slots=True)
class ConvertedRow(Generic[Result]):
    """The result of a row."""

    number: int
    """See `Row.number`."""
    epoch: int
    """See `Piece.epoch`."""
    state: dict[str, Any]
    """State of the stream after the row."""
    result: Result | AgentrlError | None
    """None if the row is left out."""


class RowWorker(Generic[Result]):
    """Reads and converts rows. Each worker process has a copy.

    Args:
        table: of the rows; None if pieces have the rows themselves.
        convert: of each row.
    """

    def __init__(self, table: RowTable | None, convert: RowFunction[Result]) -> None:
        self.table = table
        self.convert = convert
        self.at: Any = None
        """Shared memory of the worker processes: for each its process id, and the number of its row; 0 is none."""

    def __getitem__(self, piece: Piece) -> list[ConvertedRow[Result]]:
        """Return the results of a piece; it is an item of this data set to `torch.utils.data.DataLoader`."""
        converted: list[ConvertedRow[Result]] = []
        for count, row in enumerate(piece.rows, 1):
            number, result = self._convert(row)
            state = {**piece.begin, "position": piece.begin["position"] + count}
            converted.append(ConvertedRow(number, piece.epoch, state, result))
        return converted

    def _convert(self, row: int | Row) -> tuple[int, Result | AgentrlError | None]:
        number = row + 1 if isinstance(row, int) else row.number
        try:
            if isinstance(row, int):
                assert self.table is not None, "pieces have the rows, or there is a table"
                row = self.table[row]
            number = row.number
            self._note(number)
            return number, self.convert(row)
        except AgentrlError as error:
            return number, error
        finally:
            self._note(0)

    def _note(self, number: int) -> None:
        if self.at is not None:
            from torch.utils.data import get_worker_info

            info = get_worker_info()
            assert info is not None, "only worker processes have this memory"
            self.at[2 * info.id], self.at[2 * info.id + 1] = os.getpid(), number


class OrderedRows(Generic[Result]):
    """Iterator over the results of pieces, in order, whatever the number of worker processes.

    Args:
        path: of the rows, for messages.
        pieces: read ahead of the results.
        worker: reads and converts.
        workers: number of processes; 0 is this one.
    """

    def __init__(self, path: Any, pieces: Iterable[Piece], worker: RowWorker[Result], workers: int) -> None:
        self._path = path
        self._workers = workers
        self._worker = worker
        self._batches: Iterator[list[ConvertedRow[Result]]] = (
            self._from_workers(pieces) if workers else map(worker.__getitem__, pieces)
        )
        self._results: Iterator[ConvertedRow[Result]] = iter(())
        self._processes: list[BaseProcess] = []

    def __iter__(self) -> Iterator[ConvertedRow[Result]]:
        """Return the iterator itself."""
        return self

    def __next__(self) -> ConvertedRow[Result]:
        """Return the next result.

        Raises:
            DataError: a worker process died.
        """
        while (row := next(self._results, None)) is None:
            with waiting("data", str(self._path)):
                self._results = iter(next(self._batches))
        return row

    def _from_workers(self, pieces: Iterable[Piece]) -> Iterator[list[ConvertedRow[Result]]]:
        import torch
        from torch.utils.data import DataLoader

        processes = worker_processes([__name__, "torch"])  # imported once, not by each worker
        self._worker.at = processes.RawArray("q", 2 * self._workers)
        children = multiprocessing.active_children()
        batches = iter(
            DataLoader(
                self._worker,  # type: ignore[arg-type]
                sampler=pieces,
                batch_size=None,
                num_workers=self._workers,
                multiprocessing_context=processes,
                worker_init_fn=init_worker_process,
                generator=torch.Generator(),  # the default one is the run's
            )
        )
        self._processes = [process for process in multiprocessing.active_children() if process not in children]
        atexit.register(self.close)  # workers ignore the signal with which Python would end them, and it would wait
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                if "exited unexpectedly" not in str(error):
                    raise
                raise self._death() from error
            yield batch

    def _death(self) -> DataError:
        """Return the error for a worker process that died."""
        dead = {process.pid for process in self._processes if not process.is_alive()}
        slots = [self._worker.at[2 * index : 2 * index + 2] for index in range(self._workers)]
        rows = [describe_location(self._path, number) for pid, number in slots if pid in dead and number]
        at = f" at {' and '.join(rows)}" if rows else " between two rows"
        return DataError(
            f"data.path={self._path}: a worker process (data.workers={self._workers}) was killed or crashed{at}. "
            "If memory is short, lower data.workers"
        )

    def close(self) -> None:
        """Kill the worker processes. They hold nothing that is needed."""
        atexit.unregister(self.close)
        for process in self._processes:
            process.kill()
        self._batches = iter(())
