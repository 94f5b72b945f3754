"""KV cache slots: the tokens whose keys and values each one has, prefix reuse, and assignment to requests."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

DEFER_TOKENS = 32
"""A request waits one step if another request of this step computes at least this many more tokens of its prefix."""

_SPARE_TOKENS = 8
"""A request reuses an idle slot, rather than copying its prefix, if at most so many other cached tokens are lost."""


class NoSlot(Enum):
    """Why a request gets no slot in this step."""

    FULL = "full"
    """All slots are active."""
    PREFIX_PENDING = "shared"
    """This step computes a long prefix of the request, which the next step can copy."""


@dataclass(frozen=True, slots=True)
class SlotAssignment:
    """The slot of a request, and the prefix that is reused."""

    slot: int
    source: int
    """The slot whose first ``cached`` tokens are to be copied; equal to ``slot`` if nothing is to be copied."""
    cached: int
    """Tokens of the request whose keys and values are in the cache."""


class SlotTable:
    """``S`` slots of ``C`` tokens. The slot of a finished request serves as prefix cache until it is needed.

    ``tokens[S, C]`` are the token ids, ``held[S]`` how many of them have keys and values, ``planned[S]`` how many will
    have them after the step that is being prepared.
    """

    def __init__(self, slots: int, context: int) -> None:
        """Create empty slots."""
        self.tokens: NDArray[np.int32] = np.zeros((slots, context), np.int32)
        self.held: NDArray[np.int64] = np.zeros(slots, np.int64)
        self.planned: NDArray[np.int64] = np.zeros(slots, np.int64)
        self.active: NDArray[np.bool_] = np.zeros(slots, np.bool_)
        self.stale: NDArray[np.bool_] = np.zeros(slots, np.bool_)
        """Active slots with keys and values of older weights: no prefix is copied from them."""
        self._namespaces: NDArray[np.int64] = np.zeros(slots, np.int64)
        """Namespaces of the requests that computed keys and values: they are reused within one namespace."""
        self._used: NDArray[np.int64] = np.zeros(slots, np.int64)
        self._clock = 0
        self._top = 0
        """Slots from this index on have never been used."""

    def assign(
        self, tokens: NDArray[np.int32], max_reused: int | None = None, namespace: int = 0
    ) -> SlotAssignment | NoSlot:
        """Assign a slot to a request of ``tokens`` and make it active, or return why the request must wait.

        At most ``max_reused`` tokens of its prefix are reused; None: all but the last. Only those of the same namespace are.
        """
        source, cached, pending = self._match(tokens, len(tokens) - 1 if max_reused is None else max_reused, namespace)
        if pending - cached >= DEFER_TOKENS:
            return NoSlot.PREFIX_PENDING
        if cached and not self.active[source] and self.held[source] - cached <= _SPARE_TOKENS:
            slot = source
        else:
            free_slot = self._free()
            if free_slot is None:
                return NoSlot.FULL
            slot = free_slot
        count = len(tokens)
        self.tokens[slot, :count] = tokens
        self.held[slot], self.planned[slot] = cached, count
        self.active[slot], self.stale[slot], self._namespaces[slot] = True, False, namespace
        self._top = max(self._top, slot + 1)
        return SlotAssignment(slot, source if cached else slot, cached)

    def _match(self, tokens: NDArray[np.int32], count: int, namespace: int) -> tuple[int, int, int]:
        """Return the slot with the longest cached prefix, that length, and the longest prefix after this step.

        Prefixes are of the first ``count`` tokens: those after them are computed, because their logits are needed.
        """
        top = self._top
        if count == 0 or top == 0:
            return 0, 0, 0
        differs = np.empty((top, count + 1), np.bool_)
        np.not_equal(self.tokens[:top, :count], tokens[:count], out=differs[:, :count])
        differs[:, count] = True
        common = differs.argmax(axis=1)
        common[self.stale[:top] | (self._namespaces[:top] != namespace)] = 0
        cached = np.minimum(common, self.held[:top])
        # Ties go to an idle slot that can be reused without copying.
        reusable = (self.held[:top] - cached <= _SPARE_TOKENS) & ~self.active[:top]
        best = int((cached * 2 + reusable).argmax())
        return best, int(cached[best]), int(np.minimum(common, self.planned[:top]).max())

    def _free(self) -> int | None:
        idle = np.flatnonzero(~self.active)
        if not len(idle):
            return None
        return int(idle[np.where(self.held[idle] == 0, -1, self._used[idle]).argmin()])

    def append(self, slot: int, token: int) -> None:
        """Append a sampled ``token`` to a slot; its keys and values are computed in this step."""
        self.tokens[slot, self.planned[slot]] = token
        self.planned[slot] += 1

    def mark_computed(self) -> None:
        """Record that all planned keys and values have been computed."""
        self.held[:] = self.planned

    def release(self, slot: int) -> None:
        """Make a slot idle; its tokens stay in the prefix cache until the slot is reused."""
        self.active[slot] = False
        if self.stale[slot]:
            self.held[slot] = 0
        self.stale[slot] = False
        self.planned[slot] = self.held[slot]
        self._clock += 1
        self._used[slot] = self._clock

    def flush(self) -> None:
        """Drop the prefix cache: empty the idle slots, and exclude the active ones from reuse."""
        self.held[~self.active] = 0
        self.planned[~self.active] = 0
        self.stale[self.active] = True
