"""Chats of a file as training rows, for supervised fine-tuning.

A chat is replayed as an episode in which the policy says what the assistant says: rows and masks are those of a trajectory that
sampled these turns.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, ConversationError, TaskError
from agentrl.core.types import Message, Row, ToolCall
from agentrl.data.chats import Chat, ChatConversion
from agentrl.data.file_tasks import convert_all
from agentrl.data.rows import Row as DataRow
from agentrl.data.rows import RowTable, open_table
from agentrl.episode.conversation import Conversation
from agentrl.episode.state import EpisodeState
from agentrl.render.renderer import ChatRenderer
from agentrl.sft.base import SftData, StepRows
from agentrl.sft.scripted import DemonstratedTrajectory, scripted_context

Turns = Literal["all", "last"]
"""See ``sft.turns``."""


async def chat_rows(chat: Chat, renderer: ChatRenderer, turns: Turns = "all", name: str = "") -> list[Row]:
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
    return [row for row in state.trajectory.rows(name, name) if row.mask.any()]


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
    """CRC-32 of ids and masks."""


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
        rows = asyncio.run(chat_rows(chat, self._renderer, turns))
        checksum = 0
        for training_row in rows:
            checksum = zlib.crc32(training_row.token_ids.tobytes() + training_row.mask.tobytes(), checksum)
        sizes = [len(training_row.token_ids) for training_row in rows]
        return ChatSize(max(sizes), sum(sizes), sum(int(training_row.mask.sum()) for training_row in rows), checksum)


@dataclass(slots=True)
class ChatFile:
    """The chats of a file that can be used, and what was found when they were read."""

    path: Path
    """The file."""
    key: str
    """The configuration key that names it."""
    numbers: NDArray[np.int64]
    """Their indices in the table of rows."""
    tokens: int = 0
    """Tokens of all chats."""
    trained: int = 0
    """Tokens with mask 1."""
    checksum: int = 0
    """CRC-32 over all chats."""
    left_out: int = 0
    """Chats that ``data.convert`` leaves out."""
    overlong: int = 0
    """Chats with more than ``sft.max_tokens``."""
    longest: tuple[int, str] = field(default=(0, ""))
    """Tokens and place of the longest row."""

    @property
    def description(self) -> str:
        """One line for the user."""
        parts = [f"{len(self.numbers):,} chats, {self.tokens:,} tokens, {self.trained:,} of them trained"]
        if self.overlong:
            parts.append(
                f"{self.overlong:,} left out by sft.max_tokens (the longest: {self.longest[1]}, {self.longest[0]:,} tokens)"
            )
        if self.left_out:
            parts.append(f"{self.left_out:,} left out by data.convert")
        return f"{self.path}: {'; '.join(parts)}"


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
            file.left_out += 1
            continue
        file.longest = max(file.longest, (size.longest, location), key=lambda row: row[0])
        if sft.max_tokens is not None and size.longest > sft.max_tokens:
            file.overlong += 1
            continue
        if context is not None and size.longest > context:
            raise ConfigError(
                f"{location} has {size.longest:,} tokens, and model.path={config.model.path} takes {context:,}: set "
                f"sft.max_tokens={context} to leave out longer chats"
            )
        numbers.append(number)
        file.tokens += size.tokens
        file.trained += size.trained
        file.checksum = zlib.crc32(size.checksum.to_bytes(4, "little"), file.checksum)
    if not numbers:
        raise ConfigError(f"{key}={path} has no chat to train on; {file.description}")
    file.numbers = np.array(numbers, np.int64)
    return file


def split_off(file: ChatFile, share: float, seed: int) -> tuple[ChatFile, ChatFile]:
    """Return the chats to train on, and a share of them, drawn with a seed, to evaluate on.

    Raises:
        ConfigError: one of the two would be empty.
    """
    count = round(share * len(file.numbers))
    if not 0 < count < len(file.numbers):
        raise ConfigError(
            f"sft.eval_share={share:g} of the {len(file.numbers)} chats of {file.key}={file.path} is {count}; it must leave "
            "some to train on and some to evaluate on"
        )
    order = np.random.default_rng(seed).permutation(len(file.numbers))
    evaluated, trained = np.sort(order[:count]), np.sort(order[count:])
    return replace(file, numbers=file.numbers[trained]), replace(file, numbers=file.numbers[evaluated])


class Chats(SftData):
    """Item ``i`` holds the rows of the chats of step ``i``.

    Args:
        config: of the run.
        make_renderer: builds the renderer, once in each process.
        file: the chats.
        count: chats in all steps together; every chat is in one step before it is in a second one.
        shuffled: a new order in each epoch, by ``sft.seed``; else that of the file.
    """

    def __init__(
        self,
        config: Config,
        make_renderer: Callable[[], ChatRenderer],
        file: ChatFile,
        count: int,
        *,
        shuffled: bool = True,
    ) -> None:
        super().__init__(make_renderer)
        self.file = file
        self._config = config
        self._count = count
        self._shuffled = shuffled
        self._convert = ChatConversion(config.data, config.sft)
        self._table: RowTable | None = None
        self._order: tuple[int, NDArray[np.int64]] = (-1, file.numbers)

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_table": None}

    @override
    def __len__(self) -> int:
        return -(-self._count // self._config.sft.batch_size)

    @override
    def __getitem__(self, index: int) -> list[StepRows]:
        size = self._config.sft.batch_size
        end = min((index + 1) * size, self._count)
        rows = asyncio.run(self._rows(range(index * size, end)))
        return [StepRows(rows, {"sft/epoch": end / len(self.file.numbers)})]

    async def _rows(self, positions: range) -> list[Row]:
        if self._table is None:
            rows_key = self._config.data.rows_key
            self._table = open_table(self.file.path, self.file.key, self._convert.columns, rows_key)
        rows = []
        for position in positions:
            epoch, place = divmod(position, len(self.file.numbers))
            chat = self._convert(self._table[int(self._numbers(epoch)[place])])
            assert chat is not None, "read_chats has left it out"
            rows += await chat_rows(chat, self.renderer, self._config.sft.turns, f"{chat.location}#{epoch}")
        return rows

    def _numbers(self, epoch: int) -> NDArray[np.int64]:
        """Return the numbers of the chats in the order of an epoch."""
        if self._shuffled and self._order[0] != epoch:
            generator = np.random.default_rng([self._config.sft.seed, epoch])
            self._order = (epoch, generator.permutation(self.file.numbers))
        return self._order[1]
