"""Limits of an episode: turns, tokens, wall time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one episode; the configuration's ``rollout.*`` and ``sampler.max_new_tokens``."""

    max_turns: int
    """Turns of the policy in the whole episode, branches included."""
    max_tokens: int
    """Tokens of one context, prompt and observations included; branches and rewritten conversations count separately."""
    max_seconds: float
    """Wall time, tools and queues included."""
    max_new_tokens: int
    """Tokens of one turn."""

    def __post_init__(self) -> None:
        """Refuse limits under which nothing could be sampled."""
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"rollout limit {name}={getattr(self, name)} must be above 0")

    def room(self, prompt_tokens: int) -> int:
        """Return the number of tokens that the next turn may have after a prompt of ``prompt_tokens``; 0 or less: none."""
        return min(self.max_new_tokens, self.max_tokens - prompt_tokens)
