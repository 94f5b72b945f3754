"""Which tokens' keys and values each slot of the cache holds, and who may have a slot."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

DEFER_TOKENS = 32
"""A request waits one step where another of the same step computes this many more tokens of its prefix."""

_SPARE_TOKENS = 8
"""A request takes an idle slot over, rather than copying from it, where at most so many of its tokens are lost."""


class Wait(Enum):
    """Why a request gets no slot now."""

    FULL = "full"
    """All slots are active."""
    SHARED = "shared"
    """This step computes a long prefix of it, which the next one can copy."""


@dataclass(frozen=True, slots=True)
class Place:
    """A slot for a request."""

    slot: int
    source: int
    """The slot whose first ``cached`` tokens are to be copied; the slot itself where nothing is."""
    cached: int
    """Tokens of the request whose keys and values exist."""


class SlotTable:
    """``S`` slots of ``C`` tokens. A finished request's slot stays a cache until the space is needed.

    ``tokens[S, C]`` are the ids, ``held[S]`` how many of them have keys and values, ``planned[S]`` how many will
    after the step that is being put together.
    """

    def __init__(self, slots: int, context: int) -> None:
        """Start with empty slots."""
        self.tokens: NDArray[np.int32] = np.zeros((slots, context), np.int32)
        self.held: NDArray[np.int64] = np.zeros(slots, np.int64)
        self.planned: NDArray[np.int64] = np.zeros(slots, np.int64)
        self.active: NDArray[np.bool_] = np.zeros(slots, np.bool_)
        self.stale: NDArray[np.bool_] = np.zeros(slots, np.bool_)
        """Active slots with keys and values of older weights: nobody may copy from them."""
        self._used: NDArray[np.int64] = np.zeros(slots, np.int64)
        self._clock = 0
        self._top = 0
        """Slots from here on have never been used."""

    def place(self, tokens: NDArray[np.int32]) -> Place | Wait:
        """Find a slot for a request of ``tokens``, active from then on, or say why it waits."""
        source, cached, coming = self._match(tokens)
        if coming - cached >= DEFER_TOKENS:
            return Wait.SHARED
        if cached and not self.active[source] and self.held[source] - cached <= _SPARE_TOKENS:
            slot = source
        else:
            found = self._free()
            if found is None:
                return Wait.FULL
            slot = found
        count = len(tokens)
        self.tokens[slot, :count] = tokens
        self.held[slot], self.planned[slot] = cached, count
        self.active[slot], self.stale[slot] = True, False
        self._top = max(self._top, slot + 1)
        return Place(slot, source if cached else slot, cached)

    def _match(self, tokens: NDArray[np.int32]) -> tuple[int, int, int]:
        """Return the slot with the longest common prefix, its length, and that length after this step."""
        # The last token is always computed: its logits are what the request is here for.
        count, top = len(tokens) - 1, self._top
        if count == 0 or top == 0:
            return 0, 0, 0
        differs = np.empty((top, count + 1), np.bool_)
        np.not_equal(self.tokens[:top, :count], tokens[:count], out=differs[:, :count])
        differs[:, count] = True
        common = differs.argmax(axis=1)
        common[self.stale[:top]] = 0
        now = np.minimum(common, self.held[:top])
        # Among equals an idle slot that can be taken as it is comes first.
        whole = (self.held[:top] - now <= _SPARE_TOKENS) & ~self.active[:top]
        best = int((now * 2 + whole).argmax())
        return best, int(now[best]), int(np.minimum(common, self.planned[:top]).max())

    def _free(self) -> int | None:
        idle = np.flatnonzero(~self.active)
        if not len(idle):
            return None
        return int(idle[np.where(self.held[idle] == 0, -1, self._used[idle]).argmin()])

    def append(self, slot: int, token: int) -> None:
        """Say that ``token`` comes next in a slot; its keys and values are to be computed."""
        self.tokens[slot, self.planned[slot]] = token
        self.planned[slot] += 1

    def computed(self) -> None:
        """Say that everything planned has been computed."""
        self.held[:] = self.planned

    def release(self, slot: int) -> None:
        """Let others have the slot; until then its tokens are a cache."""
        self.active[slot] = False
        if self.stale[slot]:
            self.held[slot] = 0
        self.stale[slot] = False
        self.planned[slot] = self.held[slot]
        self._clock += 1
        self._used[slot] = self._clock

    def flush(self) -> None:
        """Forget what idle slots hold, and let nobody copy from active ones."""
        self.held[~self.active] = 0
        self.planned[~self.active] = 0
        self.stale[self.active] = True
