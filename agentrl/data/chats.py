"""Rows of data to chats for supervised fine-tuning: chat messages, or pairs of a prompt and a completion."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.config.sft import SftConfig
from agentrl.config.tasks import DataConfig
from agentrl.core.errors import ConfigError
from agentrl.core.tool import Tool
from agentrl.core.tool_arguments import schema_problem
from agentrl.core.types import Message
from agentrl.data.conversion import RowConversion, make_messages, make_prompt, untrained_messages, with_parents
from agentrl.data.rows import Row


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation whose assistant turns are trained. Example: ``Chat("chats.jsonl, line 3", messages, (), 0)``."""

    location: str
    """File and row, for messages."""
    messages: tuple[Message, ...]
    """From the first to the last assistant message."""
    tools: tuple[Tool, ...]
    """What the policy may call."""
    first: int
    """Index of the first message that is no part of the prompt: assistant messages before it are not trained."""
    untrained: frozenset[int] = frozenset()
    """Indices of further messages that are not trained: ``weight: 0`` of a message."""


class ChatConversion:
    """Makes a chat of a row, or leaves the row out. Worker processes get a copy.

    Args:
        data: the ``data`` section.
        sft: the ``sft`` section.
    """

    def __init__(self, data: DataConfig, sft: SftConfig) -> None:
        self._data = data
        self._sft = sft
        self._rows = RowConversion(data)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without what a worker process loads for itself."""
        return ChatConversion, (self._data, self._sft)

    @property
    def columns(self) -> set[str] | None:
        """The columns that are read; None: all, because a conversion may read any."""
        sft = self._sft
        keys = [self._data.input_key, self._data.image_key, sft.messages_key, sft.completion_key, sft.tools_key]
        return None if self._data.convert is not None else with_parents(filter(None, keys))

    def __call__(self, row: Row) -> Chat | None:
        """Return the chat of a row; None if ``data.convert`` leaves it out.

        Raises:
            ConfigError: the conversion raises, or the row has no chat that can be trained on; the message has the place.
        """
        converted = self._rows.convert(row)
        return None if converted is None else self._make(converted)

    def _make(self, row: Row) -> Chat:
        data, sft = self._data, self._sft
        untrained: frozenset[int] = frozenset()
        if row.find(sft.messages_key) is not None:
            messages, first = make_messages(row, sft.messages_key, "sft.messages_key", data.image_key), 0
            untrained = untrained_messages(row, sft.messages_key, "sft.messages_key")
        elif (completion := row.find(sft.completion_key)) is not None:
            prompt = make_prompt(row, data)
            messages, first = (*prompt, *self._completion(row)), len(prompt)
            if not isinstance(completion, str):
                numbers = untrained_messages(row, sft.completion_key, "sft.completion_key")
                untrained = frozenset(first + number for number in numbers)
        else:
            raise ConfigError(
                f"{row.location} has neither {sft.messages_key!r} (sft.messages_key) nor {sft.completion_key!r} "
                f"(sft.completion_key); it has the keys: {', '.join(map(str, row.columns)) or 'none'}"
            )
        turns = [index for index in range(first, len(messages)) if messages[index].role == "assistant"]
        if not {*turns} - untrained:
            weights = " whose weight is not 0" if turns else ""
            raise ConfigError(f"{row.location} has no message of the role assistant to train on{weights}")
        if turns[0] == 0:
            raise ConfigError(
                f"{row.location} begins with a message of the role assistant, which has no prompt; begin with system or user"
            )
        for index in turns:
            if index > first and messages[index - 1].role == "assistant":
                raise ConfigError(f"{row.location}: message {index + 1} of the role assistant follows another one")
            if messages[index].content == "" and not messages[index].tool_calls:
                raise ConfigError(f"{row.location}: message {index + 1} of the role assistant is empty")
        return Chat(row.location, messages[: turns[-1] + 1], self._tools(row), first, untrained)

    def _completion(self, row: Row) -> tuple[Message, ...]:
        key = self._sft.completion_key
        completion = row.get(key, "sft.completion_key")
        if isinstance(completion, str):
            return (Message("assistant", completion),)
        if not self._data.apply_chat_template:
            raise ConfigError(
                f"{row.location}: {key!r} (sft.completion_key) is a {type(completion).__name__}; with "
                "data.apply_chat_template=false it is one text"
            )
        return make_messages(row, key, "sft.completion_key")

    def _tools(self, row: Row) -> tuple[Tool, ...]:
        key = self._sft.tools_key
        value = row.find(key)
        if is_text := isinstance(value, str):
            try:
                value = json.loads(value or "[]")
            except (ValueError, RecursionError):
                raise ConfigError(f"{row.location}: {key!r} (sft.tools_key) is no JSON: {value!r:.80}") from None
        if value is not None and not isinstance(value, Sequence):
            raise ConfigError(f"{row.location}: {key!r} (sft.tools_key) must be a list of tools, and is {value!r:.80}")
        # JSON text has the nulls that it should have.
        tools: Any = value if is_text else row.without_fill(value)
        return tuple(_tool(tool, f"{row.location}: {key!r} (sft.tools_key)") for tool in tools or ())


def _tool(value: Any, where: str) -> Tool:
    """Return a tool in the format of OpenAI: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""
    function = value.get("function", value) if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise ConfigError(
            f"{where} has the tool {value!r:.120}, which must be {{type, function: {{name, description, parameters}}}}"
        )
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise ConfigError(f"{where}: the parameters of {name} are {parameters!r:.80}, and no JSON Schema")
    if problem := schema_problem(parameters):
        raise ConfigError(f"{where}: {name}: {problem}")
    return Tool(name, str(function.get("description") or ""), dict(parameters))
