"""Gymnasium spaces for messages.

Gymnasium's own ``Text`` space refuses every character outside a fixed set, even a space, so agentrl has its own.
"""

from __future__ import annotations

from typing import Any, get_args

import gymnasium
import numpy as np

from agentrl.core.types import Message, Rewrite, Role, ToolCall, ToolCalls, ToolResults

_SYLLABLES = ("a", "an", "be", "for", "it", "lo", "me", "no", "of", "so", "the", "to", "we", "yes", "zu")


def _sample_text(rng: np.random.Generator) -> str:
    words = [_SYLLABLES[int(rng.integers(len(_SYLLABLES)))] for _ in range(int(rng.integers(1, 8)))]
    return " ".join(words)


def observation_fault(observation: object) -> str:
    """Return what is wrong with an observation and what it should be, in one line; empty if nothing is."""
    if isinstance(observation, Rewrite):
        return ""
    if isinstance(observation, ToolCalls):
        is_valid = all(isinstance(call, ToolCall) for call in observation.calls)
        return "" if is_valid else f"{_short(observation)}, whose calls must be a tuple of ToolCalls"
    if not isinstance(observation, tuple) or not all(isinstance(message, Message) for message in observation):
        text = observation if isinstance(observation, str) else "…"
        return (
            f'{_short(observation)}, which must be a tuple of messages, such as (Message("user", {_short(text)}),), '
            "or ToolCalls or a Rewrite"
        )
    for message in observation:
        if message.role not in get_args(Role):
            return f"{_short(observation)}: roles are {', '.join(get_args(Role))}, and not {message.role!r}"
        if not isinstance(message.content, str):
            return f"{_short(observation)}: the content of a message must be a str, and is {_short(message.content)}"
    return ""


def _short(value: object) -> str:
    return f"{value!r:.80}" if isinstance(value, str) else f"{value!r:.160}"


class MessageSpace(gymnasium.Space[Any]):
    """All observations: tuples of `Message`, `ToolCalls` for the runner, or a `Rewrite`."""

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> tuple[Message, ...]:
        """Return one user message of random words."""
        return (Message("user", _sample_text(self.np_random)),)

    def contains(self, x: Any) -> bool:
        """Return whether ``x`` is an observation."""
        return not observation_fault(x)

    def __repr__(self) -> str:
        """Return the constructor."""
        return "MessageSpace()"

    def __eq__(self, other: object) -> bool:
        """All message spaces are the same."""
        return isinstance(other, MessageSpace)

    __hash__ = object.__hash__


class ActionSpace(gymnasium.Space[Any]):
    """All actions: an assistant `Message`, or the `ToolResults` of calls that the environment returned."""

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> Message:
        """Return an assistant message of random words."""
        return Message("assistant", _sample_text(self.np_random))

    def contains(self, x: Any) -> bool:
        """Return whether ``x`` is an action."""
        return isinstance(x, ToolResults) or (isinstance(x, Message) and x.role == "assistant")

    def __repr__(self) -> str:
        """Return the constructor."""
        return "ActionSpace()"

    def __eq__(self, other: object) -> bool:
        """All action spaces are the same."""
        return isinstance(other, ActionSpace)

    __hash__ = object.__hash__
