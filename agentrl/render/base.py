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
        """The padding token."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt:
        """Return the prompt of the whole conversation, ending with the opener of the policy's next turn."""
        ...

    def bridge(
        self, history: Sequence[Message], sampled_ids: Sequence[int], new: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> tuple[int, ...] | Fork:
        """Return the ids to append to ``sampled_ids``, the last message of ``history``.

        These are the rest of the end of the turn, the ``new`` messages and the opener of the next turn. Returns a `Fork`
        with the reason if the result is not proven to be what the chat format would write.
        """
        ...

    def parse(
        self, sampled_ids: Sequence[int], tools: Sequence[Tool] = (), *, prompt_ids: Sequence[int] = ()
    ) -> Message:
        """Return the assistant message of one sampled turn without its end token. Never raises.

        ``tool_calls`` has every attempt to call one of ``tools``, each with a status. ``prompt_ids`` is the prompt of the
        turn, which may have opened the reasoning.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        ...
