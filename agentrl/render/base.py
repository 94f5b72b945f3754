"""The renderer contract: conversion of messages to tokens, and of sampled tokens to messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentrl.core.tool import Tool
from agentrl.core.types import Fork, Message, Prompt


class Renderer(Protocol):
    """Converts messages to tokens and sampled tokens to messages, in one chat format.

    Sampled ids are never decoded and encoded again: the next prompt of a row is the sampled ids with the ids of `bridge`
    appended. If that would differ from the chat format, `bridge` returns a `Fork`, and the caller starts a new row with
    `render`.
    """

    @property
    def end_token_id(self) -> int:
        """The token that the format writes at the end of a turn of the policy."""
        ...

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """All tokens at which the engine stops a turn of the policy, `end_token_id` first."""
        ...

    @property
    def pad_token_id(self) -> int:
        """The tokenizer's padding token, or else the end token; no token attends to padding."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt:
        """Return the prompt of the whole conversation, ending with the opener of the policy's next turn.

        Inline messages continue the assistant message before them. If the last message is inline, the policy's turn is
        still open, and the prompt ends with that message. If the first one is inline, it is a raw prompt: no chat format is
        applied.

        Raises:
            ConversationError: the format refuses the conversation.
            ModelError: the format is the chat template, and the tokenizer has none.
        """
        ...

    def bridge(
        self, history: Sequence[Message], sampled_ids: Sequence[int], new: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> Prompt | Fork:
        """Return the ids to append to ``sampled_ids``: the rest of the turn's end, ``new``, and the next opener.

        The rest of the end is what the engine has not sampled: the end token if a stop string or the length limit ended
        the turn, and always the format's newline after it. Inline messages are appended without formatting.

        Args:
            history: the conversation so far; it ends with the assistant message that was sampled.
            sampled_ids: ids of that message, with its end token if it has one.
            new: messages to append.
            tools: tools offered to the policy.

        Returns:
            ids with the images of ``new``, whose spans count from the first of these ids, or a `Fork` with the reason if they
            are not proven to be what the chat format would write.

        Raises:
            ConversationError: an image cannot be processed, or the format has no place for it.
        """
        ...

    def parse(
        self, sampled_ids: Sequence[int], tools: Sequence[Tool] = (), *, prompt_ids: Sequence[int] = ()
    ) -> Message:
        """Return the assistant message of one sampled turn without its end token. Never raises.

        ``content`` is the whole sampled text, reasoning and tool calls included; ``tool_calls`` has every attempt at a
        call outside of the reasoning, each with a status.

        Args:
            sampled_ids: ids of one turn.
            tools: tools offered to the policy; without them, names and arguments of calls are not checked.
            prompt_ids: prompt of the turn, to see whether it opened the reasoning; if empty, the format's opener counts.
        """
        ...

    def split_turn(self, message: Message, *, prompt_ids: Sequence[int] = ()) -> tuple[str, str]:
        """Return the reasoning and the text of a message that `parse` returned, both without the format's markers.

        The text ends where calls begin that could be parsed. Calls that could not are text.

        Args:
            message: with the calls that it is shown with.
            prompt_ids: as for `parse`.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        ...
