"""Scripted players of the negotiation."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from agentrl import Message


class GreedyPlayer:
    """Accepts an offer that is worth at least half of everything to it, and otherwise offers to keep all but one item."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._values: list[int] = []
        self._counts: list[int] = []

    def act(self, messages: tuple[Message, ...], legal_moves: Sequence[str]) -> str:
        """Return ``accept`` or an offer."""
        text = messages[-1].content
        if not self._values:
            self._counts = [int(digits) for digits in re.findall(r"(\d) [a-z]+ worth", text)]
            self._values = [int(digits) for digits in re.findall(r"worth (\d+)", text)]
        total = sum(count * value for count, value in zip(self._counts, self._values, strict=True))
        if last_offer := re.search(r"keeps (\d) (\d) (\d)", text):
            remainder = [count - int(taken) for count, taken in zip(self._counts, last_offer.groups(), strict=True)]
            worth = sum(count * value for count, value in zip(remainder, self._values, strict=True))
            if 2 * worth >= total and "accept" in legal_moves:
                return "accept"
        keep = list(self._counts)
        cheapest = [kind for kind, value in enumerate(self._values) if value == min(self._values)]
        keep[cheapest[int(self._rng.integers(len(cheapest)))]] -= 1
        return f"keep {keep[0]} {keep[1]} {keep[2]}"
