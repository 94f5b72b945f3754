"""The renderer contract: messages to tokens and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentrl.core.tool import Tool
from agentrl.core.types import Fork, Message, Prompt


class Renderer(Protocol):
    """Turns messages into tokens and back."""

    @property
    def end_token_id(self) -> int:
        """The token that ends a turn of the policy."""
        ...

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """All tokens that end a turn of the policy when it samples them, `end_token_id` first."""
        ...

    @property
    def pad_token_id(self) -> int:
        """The token that fills batches."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt:
        """Return the whole conversation as a prompt that asks the policy to speak next."""
        ...

    def bridge(
        self,
        history: Sequence[Message],
        sampled_ids: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[Tool] = (),
    ) -> tuple[int, ...] | Fork:
        """Return what to append to ``sampled_ids``, the last message of ``history``: the rest of the turn's end, the
        ``new`` messages and the opener; or, where no proof exists that this is what the chat format would say, why not:
        the caller then renders anew and forks.
        """
        ...

    def parse(
        self, sampled_ids: Sequence[int], tools: Sequence[Tool] = (), *, prompt_ids: Sequence[int] = ()
    ) -> Message:
        """Return what the policy said as an assistant message, its end token left out, with every attempt to call one
        of ``tools`` and its status. Never raises. ``prompt_ids`` are what it continues.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        ...
