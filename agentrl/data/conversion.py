"""Rows of data to tasks: the user's conversion, the columns of ``data``, and the limit on a prompt's tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast, get_args

from agentrl.config.render import RenderConfig
from agentrl.config.tasks import DataConfig
from agentrl.core.errors import ConfigError, ConversationError
from agentrl.core.imports import describe, load_object
from agentrl.core.task import Task
from agentrl.core.types import Message, Role
from agentrl.data.rows import Row

if TYPE_CHECKING:
    from agentrl.render.renderer import ChatRenderer

_ROLES = get_args(Role)


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """``data.max_prompt_tokens``, with what counts the tokens."""

    tokens: int
    """Most tokens of a prompt."""
    model: str
    """``model.path``."""
    trust_remote_code: bool
    """``model.trust_remote_code``."""
    render: RenderConfig
    """The ``render`` section."""

    def renderer(self) -> ChatRenderer:
        """Return the renderer of the policy's tokenizer; a model of the hub is downloaded."""
        from agentrl.models.load import load_tokenizer
        from agentrl.models.resolve import resolve_model
        from agentrl.render.registry import make_renderer

        folder = resolve_model(self.model)
        return make_renderer(load_tokenizer(folder, trust_remote_code=self.trust_remote_code), self.render)


class RowConversion:
    """Makes a task of a row, or leaves the row out. Worker processes get a copy.

    Args:
        data: the ``data`` section.
        limit: on the tokens of a prompt.

    """

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
        named = {data.input_key, data.label_key, data.metadata_key, data.id_key} - {None}
        return None if data.convert is not None else cast("set[str]", named)

    @property
    def filters(self) -> str:
        """The keys with which rows may be left out; empty if none is."""
        data = self._data
        keys = {"data.convert": data.convert, "data.max_prompt_tokens": self._limit and self._limit.tokens}
        return " and ".join(f"{key}={value}" for key, value in keys.items() if value is not None)

    def __call__(self, row: Row) -> Task | None:
        """Return the task of a row; None if it is left out.

        Raises:
            ConfigError: the conversion raises, or the row lacks a key or has a prompt that cannot be used.

        """
        if self._data.convert is not None:
            values = self._converted(row, self._data.convert)
            if values is None:
                return None
            row = replace(row, values=values, unread=())
        task = make_task(row, self._data)
        return None if self._limit is not None and self._is_long(row, task, self._limit) else task

    def _converted(self, row: Row, reference: str) -> Mapping[str, Any] | None:
        call = f"data.convert={reference}"
        if self._function is None:
            self._function = load_object(reference, "data.convert")
            if not callable(self._function):
                raise ConfigError(f"{call} is {self._function!r:.100}, and no function")
        try:
            values = self._function(dict(row.values))
        except Exception as error:
            raise ConfigError(f"{row.place}: {call} raised {describe(error)}") from error
        if values is not None and not isinstance(values, Mapping):
            raise ConfigError(
                f"{row.place}: {call} must return a row as a mapping, or None to leave it out; it returned {values!r:.80}"
            )
        return values

    def _is_long(self, row: Row, task: Task, limit: PromptLimit) -> bool:
        self._renderer = self._renderer or limit.renderer()
        try:
            return len(self._renderer.render(task.prompt, ()).token_ids) > limit.tokens
        except ConversationError as error:
            raise ConfigError(f"{row.place}: the chat format refuses the prompt: {error}") from error


def make_task(row: Row, data: DataConfig) -> Task:
    """Return the task of a row.

    Raises:
        ConfigError: it lacks a key, or has a prompt that cannot be used.

    """
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
