"""Chats of a file as training rows, for supervised fine-tuning.

A chat is replayed as an episode in which the policy says what the assistant says: rows and masks are those of a trajectory that
sampled these turns.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

import numpy as np
from typing_extensions import override

from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, ConversationError, TaskError
from agentrl.core.types import Message, ToolCall
from agentrl.data.chats import Chat, ChatConversion
from agentrl.data.file_tasks import convert_all
from agentrl.data.rows import Row as DataRow
from agentrl.data.rows import RowTable, open_table
from agentrl.episode.conversation import Conversation
from agentrl.episode.state import EpisodeState
from agentrl.render.renderer import ChatRenderer
from agentrl.sft.base import EpochData, ImageRows, SftFile, row_checksum
from agentrl.sft.scripted import DemonstratedTrajectory, scripted_context

Turns = Literal["all", "last"]
"""See ``sft.turns``."""
KEPT_TOKENS = 2**22
"""Tokens of encoded chats that a process keeps for later epochs: about 100 MB."""


async def chat_rows(chat: Chat, renderer: ChatRenderer, turns: Turns = "all", name: str = "") -> ImageRows:
    """Return the rows of a chat: one, and a further one after each turn before which the chat format changes earlier turns.

    Exactly the tokens that the policy would sample are ``DEMONSTRATED`` with mask 1: its turns with their end tokens.

    Args:
        chat: the conversation.
        renderer: of the policy's chat format.
        turns: ``last``: earlier turns are observed.
        name: of the rollout; the chat's location by default.

    Raises:
        ConfigError: the chat format cannot write the chat, or reads other calls from it; the message has the place.
    """
    messages, name = chat.messages, name or chat.location
    turn_indices = [index for index in range(chat.first, len(messages)) if messages[index].role == "assistant"]
    trained_turns = [number for number, index in enumerate(turn_indices) if index not in chat.untrained]
    trained_turns = trained_turns[-1:] if turns == "last" else trained_turns
    observed_turns = {*range(len(turn_indices))} - {*trained_turns}
    state = EpisodeState(name, 0, trajectory=DemonstratedTrajectory(observed_turns))
    ids: tuple[int, ...] = ()
    conversation = Conversation(scripted_context(_no_env, renderer, lambda _: ids, {}), state, chat.tools)
    try:
        conversation.begin(messages[: turn_indices[0]], name)
        for index, next_index in zip(turn_indices, [*turn_indices[1:], len(messages)], strict=True):
            turn, new = messages[index], messages[index + 1 : next_index]
            ids = renderer.write_turn(state.messages, turn, new, chat.tools)
            sampled = await conversation.sample()
            assert sampled is not None, "there are no limits"
            if not chat.tools and turn.tool_calls:
                sampled = replace(sampled, tool_calls=renderer.parse(ids, prompt_ids=state.prompt_ids).tool_calls)
            if turn.tool_calls:
                sampled = replace(sampled, tool_calls=_named_calls(turn.tool_calls, sampled.tool_calls, index))
            conversation.answer(sampled, _link_results(turn, sampled, new), over=next_index == len(messages))
    except (ConversationError, TaskError) as error:
        raise ConfigError(f"{chat.location}: {error}") from error
    rows = [row for row in state.trajectory.rows(name, name) if row.mask.any()]
    return ImageRows(rows, dict(state.trajectory.images))


def _no_env() -> NoReturn:
    raise AssertionError("a chat has no environment")


def _named_calls(calls: Sequence[ToolCall], read: Sequence[ToolCall], index: int) -> tuple[ToolCall, ...]:
    """Return the calls as they are read from the turn that the policy samples; each with an id.

    Raises:
        ConversationError: they are others than those of the chat.
    """
    names, read_names = ([call.name for call in some_calls] for some_calls in (calls, read))
    if names != read_names:
        raise ConversationError(
            f"message {index + 1} calls {', '.join(names)}, and of what the policy would sample "
            f"{', '.join(read_names) or 'no call'} is read; set render.tool_parser"
        )
    return tuple(
        replace(call_read, id=call_read.id or call.id or f"{index}.{number}")
        for number, (call, call_read) in enumerate(zip(calls, read, strict=True))
    )


def _link_results(turn: Message, sampled: Message, new: Sequence[Message]) -> list[Message]:
    """Return the messages after a turn with the ids of its calls in tool results: of the call they name, else in order."""
    numbers = {call.id: number for number, call in enumerate(turn.tool_calls) if call.id}
    linked, results = [], 0
    for message in new:
        if message.role == "tool":
            number, results = numbers.get(message.tool_call_id or "", results), results + 1
            if number < len(sampled.tool_calls):
                message = replace(message, tool_call_id=sampled.tool_calls[number].id)
        linked.append(message)
    return linked


@dataclass(frozen=True, slots=True)
class ChatSize:
    """The size of a chat in tokens."""

    longest: int
    """Tokens of its longest row."""
    tokens: int
    """Tokens of all rows."""
    trained: int
    """Those with mask 1."""
    checksum: int
    """CRC-32 of ids, masks and images."""


class ChatMeasure:
    """Returns the size of a row's chat; worker processes get a copy.

    Args:
        convert: from row to chat.
        make_renderer: builds the renderer, once in each process.
        turns: see ``sft.turns``.
    """

    def __init__(self, convert: ChatConversion, make_renderer: Callable[[], ChatRenderer], turns: Turns) -> None:
        self._arguments = convert, make_renderer, turns
        self._renderer: ChatRenderer | None = None
        self.columns = convert.columns

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the renderer."""
        return ChatMeasure, self._arguments

    def __call__(self, row: DataRow) -> ChatSize | None:
        """Return the size of the chat of a row; None if ``data.convert`` leaves it out.

        Raises:
            ConfigError: see `ChatConversion` and `chat_rows`.
        """
        convert, make_renderer, turns = self._arguments
        if (chat := convert(row)) is None:
            return None
        self._renderer = self._renderer or make_renderer()
        # `asyncio.run` writes the result's repr, which takes as long as encoding if the result has arrays.
        return asyncio.run(_measure_chat(chat, self._renderer, turns))


async def _measure_chat(chat: Chat, renderer: ChatRenderer, turns: Turns) -> ChatSize:
    rows, checksum = (await chat_rows(chat, renderer, turns)).rows, 0
    sizes = [len(row.token_ids) for row in rows]
    for row in rows:
        checksum = row_checksum(row, checksum)
    return ChatSize(max(sizes), sum(sizes), sum(int(row.mask.sum()) for row in rows), checksum)


@dataclass(slots=True)
class ChatFile(SftFile):
    """The chats of a file that can be used; ``numbers`` are their indices in the table of rows."""

    converted_away: int = 0
    """Chats that ``data.convert`` leaves out."""

    unit: ClassVar[str] = "chats"

    @property
    @override
    def left_out(self) -> list[str]:
        return [f"{self.converted_away:,} left out by data.convert"] if self.converted_away else []


def read_chats(
    config: Config, path: Path, key: str, make_renderer: Callable[[], ChatRenderer], context: int | None
) -> ChatFile:
    """Read and check all chats of a file.

    Args:
        config: of the run.
        path: of the file.
        key: the configuration key that names it.
        make_renderer: builds the renderer, once in each process.
        context: tokens that the model takes; None: not known.

    Raises:
        ConfigError: a row is no chat, the chat format cannot write it, or it is longer than the model's context; the message
            has the place. Or no chat is left.
    """
    sft, file = config.sft, ChatFile(path, key, np.empty(0, np.int64))
    measure = ChatMeasure(ChatConversion(config.data, sft), make_renderer, sft.turns)
    numbers = []
    for number, (location, size) in enumerate(convert_all(path, config.data, key, measure, config.data.workers)):
        if size is None:
            file.converted_away += 1
            continue
        if not file.takes(location, size.longest, config, context):
            continue
        numbers.append(number)
        file.tokens += size.tokens
        file.trained += size.trained
        file.checksum = zlib.crc32(size.checksum.to_bytes(4, "little"), file.checksum)
    if not numbers:
        raise ConfigError(f"{key}={path} has no chat to train on; {file.description}")
    file.numbers = np.array(numbers, np.int64)
    return file


class Chats(EpochData):
    """The chats of a file by step; see `EpochData`."""

    def __init__(
        self,
        config: Config,
        make_renderer: Callable[[], ChatRenderer],
        file: SftFile,
        count: int,
        *,
        shuffled: bool = True,
    ) -> None:
        super().__init__(config, make_renderer, file, count, shuffled=shuffled)
        self._convert = ChatConversion(config.data, config.sft)
        self._table: RowTable | None = None
        self._encoded: dict[int, ImageRows] = {}
        """Rows of chats without images by number, of up to `KEPT_TOKENS` tokens: later epochs do not encode them again."""
        self._encoded_tokens = 0

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_table": None, "_encoded": {}, "_encoded_tokens": 0}

    @override
    async def make_rows(self, number: int, epoch: int) -> ImageRows:
        encoded = self._encoded.get(number)
        if encoded is None:
            encoded = await self._encode(number)
            tokens = sum(len(row.token_ids) for row in encoded.rows)
            if not encoded.images and self._encoded_tokens + tokens <= KEPT_TOKENS:
                self._encoded[number] = encoded
                self._encoded_tokens += tokens
        return _in_epoch(encoded, epoch)

    async def _encode(self, number: int) -> ImageRows:
        if self._table is None:
            rows_key = self._config.data.rows_key
            self._table = open_table(self.file.path, self.file.key, self._convert.columns, rows_key)
        chat = self._convert(self._table[number])
        assert chat is not None, "read_chats has left it out"
        return await chat_rows(chat, self.renderer, self._config.sft.turns)


def _in_epoch(encoded: ImageRows, epoch: int) -> ImageRows:
    """Return rows with keys that differ by epoch."""
    names = [f"{row.key.rollout_id}#{epoch}" for row in encoded.rows]
    rows = [
        replace(row, key=replace(row.key, prompt_id=name, rollout_id=name))
        for row, name in zip(encoded.rows, names, strict=True)
    ]
    return ImageRows(rows, encoded.images)
