"""What a chat format is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from agentrl.core.tool import Tool
from agentrl.core.types import Fork, ForkReason, Message
from agentrl.render.parsers.base import THINK, THINK_END, CallParser


class Format(Protocol):
    """Messages as the text of one chat format. It knows no tokenizer: special tokens are written as their text.

    Contents come escaped, so that special tokens in them stay text; what the policy sampled comes as it was said, with
    its reasoning and calls in ``content`` and no ``tool_calls``. Only the ``history`` of `boundary` comes as it is.
    """

    @property
    def name(self) -> str:
        """What ``render.format`` calls it."""
        ...

    @property
    def ends(self) -> tuple[str, ...]:
        """The special tokens that may end a turn of the policy; the first is the one that the format writes.

        A format whose turns end where the next begins (GLM) has the openings of the next turn here.
        """
        ...

    @property
    def opens_thinking(self) -> bool:
        """Whether the opener of a turn ends with ``<think>``, so that what is sampled holds only ``</think>``."""
        ...

    @property
    def parser(self) -> CallParser:
        """Reads the calls in what the policy said."""
        ...

    def text(self, messages: Sequence[Message], tools: Sequence[Tool], *, opener: bool = True) -> str:
        """Return the whole conversation, with the ``opener`` of the policy's next turn.

        Raises:
            ValueError: the format has no such conversation.
        """
        ...

    def boundary(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> str | Fork:
        """Return the text from the token that ends the last turn of ``history``, the policy's, to the next opener.

        It must be what `text` says there, whatever was said before; where `text` changes earlier turns once ``new``
        messages follow, return a `Fork`.

        Args:
            history: the conversation so far; it ends with what the policy said last.
            new: at least one message.
            tools: those offered.
        """
        ...


@runtime_checkable
class InterchangeableEnds(Protocol):
    """A format in which any of several tokens may end a turn, whatever follows, as Llama 3.1's ``<|eom_id|>`` may."""

    @property
    def closings(self) -> tuple[str, ...]:
        """Those of `Format.ends` after which the conversation goes on as if the first of them had been sampled."""
        ...


def to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON as chat templates' ``tojson`` writes it."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def schema_of(tool: Tool) -> dict[str, Any]:
    """Return a tool as OpenAI's function schema, which chat templates are given."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def split_thinking(content: str) -> tuple[str, str]:
    """Return reasoning and the rest of an assistant message, as Qwen's and GLM's templates divide it; either may be empty.

    The opening ``<think>`` may be missing, where the prompt held it.
    """
    if THINK_END not in content:
        return "", content
    reasoning = content.split(THINK_END)[0].rstrip("\n").rpartition(THINK)[2].lstrip("\n")
    return reasoning, content.rpartition(THINK_END)[2].lstrip("\n")


def holds_empty_thought(content: str) -> bool:
    """Return whether what the policy said closed its reasoning and holds none."""
    return THINK_END in content and not split_thinking(content)[0].strip("\n")


def drops_thinking(history: Sequence[Message], where: str) -> Fork | None:
    """Return a `Fork` where an assistant message of ``history`` holds reasoning.

    Args:
        history: the messages whose reasoning the format would leave out now.
        where: what makes it do so, for the detail.
    """
    if any(message.role == "assistant" and THINK_END in message.content for message in history):
        return Fork(ForkReason.THINKING, f"{where} leaves earlier reasoning out")
    return None
