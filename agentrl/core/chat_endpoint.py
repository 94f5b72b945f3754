"""The contract of models that answer conversations: messages in, a message out, no tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.core.tool import Tool
from agentrl.core.types import FinishReason, Message, SamplingParams

WireMessage = Mapping[str, Any]
"""A message as OpenAI's chat completions have it, such as ``{"role": "user", "content": "3 + 4 = ?"}``."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens as an endpoint counts them, with its own tokenizer; 0 where it names none."""

    prompt_tokens: int = 0
    """Tokens of the whole conversation, in each request again."""
    completion_tokens: int = 0
    """Sampled tokens, hidden reasoning included."""
    cached_tokens: int = 0
    """Prompt tokens that the endpoint had in its cache."""
    reasoning_tokens: int = 0
    """Sampled tokens of the reasoning."""

    def __add__(self, other: Usage) -> Usage:
        """Return the sum of two usages."""
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


@dataclass(frozen=True, slots=True)
class ChatReply:
    """One turn of a model at an endpoint."""

    message: Message
    """The turn, with its reasoning in ``<think>``; its calls are not checked yet."""
    wire: WireMessage
    """The turn as it is sent back with the conversation."""
    finish_reason: FinishReason
    """Why it ended."""
    usage: Usage
    """Tokens of the request."""


class ChatEndpoint(Protocol):
    """A model that answers conversations, for example by OpenAI's chat completions."""

    @property
    def model(self) -> str:
        """Name of the model."""
        ...

    def keep_connections(self) -> AbstractAsyncContextManager[object]:
        """Return a context in which connections stay open between requests."""
        ...

    async def reply(self, messages: Sequence[WireMessage], tools: Sequence[Tool], params: SamplingParams) -> ChatReply:
        """Return the next turn of a conversation.

        Args:
            messages: the conversation.
            tools: what the model may call.
            params: of the turn. The text ends after the first of the ``stop`` strings, which stays in it.

        Raises:
            SamplerError: the endpoint failed.
        """
