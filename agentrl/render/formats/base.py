"""The contract of chat formats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from agentrl.core.tool import Tool
from agentrl.core.types import THINK, THINK_END, Fork, ForkReason, Message
from agentrl.render.parsers.base import CallParser


class Format(Protocol):
    """Writes messages as text in one chat format. It does not use a tokenizer: special tokens are written as their text.

    Contents are escaped, so that special-token text in them stays text. A sampled message has its whole text, reasoning and
    calls included, in ``content``, and no ``tool_calls`` unless it is a `ReadsSampledCalls`. Of the ``history`` of `boundary`
    only the calls of the last message are escaped.
    """

    @property
    def name(self) -> str:
        """Name of the format in ``render.format``."""
        ...

    @property
    def ends(self) -> tuple[str, ...]:
        """The special tokens that may end a turn of the policy; the format writes the first.

        In a format whose turns end with the start of the next message (GLM), these are the tokens that start messages.
        """
        ...

    @property
    def opens_thinking(self) -> bool:
        """Whether the opener of a turn ends with ``<think>``, so that the sampled text has only ``</think>``."""
        ...

    @property
    def parser(self) -> CallParser:
        """Parser of the tool calls in the policy's turns."""
        ...

    def text(self, messages: Sequence[Message], tools: Sequence[Tool], *, opener: bool = True) -> str:
        """Return the text of the whole conversation, with the ``opener`` of the policy's next turn.

        Raises:
            ValueError: the format does not allow such a conversation.
        """
        ...

    def boundary(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> str | Fork:
        """Return the text from the token that ends the last turn of ``history``, the policy's, to the next opener.

        It must equal the text of `text` in this place for any ``history``; if `text` changes earlier turns when ``new``
        messages follow, return a `Fork`.

        Args:
            history: the conversation so far, ending with a turn of the policy.
            new: at least one message.
            tools: tools offered to the policy.
        """
        ...


@runtime_checkable
class InterchangeableEnds(Protocol):
    """A format in which several tokens may end a turn interchangeably, such as Llama 3.1's ``<|eom_id|>``."""

    @property
    def closings(self) -> tuple[str, ...]:
        """Tokens of `Format.ends` after which the conversation continues as after the first of them."""
        ...


@runtime_checkable
class ReadsSampledCalls(Protocol):
    """A format that is given the calls of a sampled message too, although they are in its content."""

    reads_sampled_calls: ClassVar[bool]
    """True."""


@runtime_checkable
class WritesImages(Protocol):
    """A format that writes the placeholder of the model's processor at the marks of a message's images, in their order."""

    writes_images: ClassVar[bool]
    """True."""


def to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON in the style of the ``tojson`` filter of chat templates."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def tool_schema(tool: Tool) -> dict[str, Any]:
    """Return a tool as OpenAI's function schema, the input of chat templates."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def split_thinking(content: str) -> tuple[str, str]:
    """Return reasoning and the rest of an assistant message, split as in Qwen's and GLM's templates; either may be empty.

    The opening ``<think>`` is missing if it was part of the prompt.
    """
    if THINK_END not in content:
        return "", content
    reasoning = content.split(THINK_END)[0].rstrip("\n").rpartition(THINK)[2].lstrip("\n")
    return reasoning, content.rpartition(THINK_END)[2].lstrip("\n")


def holds_empty_thought(content: str) -> bool:
    """Return whether a turn has closed reasoning that is empty."""
    return THINK_END in content and not split_thinking(content)[0].strip("\n")


def drops_thinking(history: Sequence[Message], cause: str) -> Fork | None:
    """Return a `Fork` if an assistant message of ``history`` has reasoning.

    Args:
        history: messages whose reasoning the format would drop now.
        cause: why it is dropped, for the detail of the fork.
    """
    if any(message.role == "assistant" and THINK_END in message.content for message in history):
        return Fork(ForkReason.THINKING, f"{cause} leaves earlier reasoning out")
    return None
