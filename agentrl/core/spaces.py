"""Gymnasium spaces for messages.

Gymnasium's own ``Text`` space refuses every character outside a fixed set, even a space, so agentrl has its own.
"""

from __future__ import annotations

from typing import Any

import gymnasium

from agentrl.core.types import Message, Rewrite, ToolCalls, ToolResults

_SYLLABLES = ("a", "an", "be", "for", "it", "lo", "me", "no", "of", "so", "the", "to", "we", "yes", "zu")


def _sample_text(rng: Any) -> str:
    words = [_SYLLABLES[int(rng.integers(len(_SYLLABLES)))] for _ in range(int(rng.integers(1, 8)))]
    return " ".join(words)


class MessageSpace(gymnasium.Space[Any]):
    """All observations: tuples of `Message`, `ToolCalls` for the runner, or a `Rewrite`."""

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> tuple[Message, ...]:
        """Return one user message of random words."""
        return (Message("user", _sample_text(self.np_random)),)

    def contains(self, x: Any) -> bool:
        """Return whether ``x`` is an observation."""
        if isinstance(x, ToolCalls | Rewrite):
            return True
        return isinstance(x, tuple) and all(isinstance(message, Message) for message in x)

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
