"""What one forward pass computes: tokens of many requests in one row, and which slot each belongs to.

Shapes: ``N`` tokens of ``B`` requests. Requests with one token (decoding) come first, by slot; those with more
(a prompt, or what an observation added) follow. No token is padding, so linear layers waste nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GAP = 2
"""Idle slots between active ones that are computed along rather than starting another attention call."""
_BLOCK = 512
"""Query tokens an attention call of a long prompt has: bounds its mask, and skips most of what it would hide."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens that one request adds."""

    slot: int
    start: int
    """Position of the first of them: so many tokens the slot holds already."""
    tokens: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Run:
    """Decoding slots ``[first, last)`` that lie side by side, so that their cache is one view; rows of ``place``."""

    first: int
    last: int
    rows: slice
    lengths: Tensor
    """``[R]`` keys that each slot's query sees, its own included; 1 for idle slots in between."""
    longest: int

    def bias(self, window: int | None) -> Tensor:
        """Return what is added to the scores, ``[R, 1, 1, longest]``: 0 where the query sees the key, else -inf."""
        positions = torch.arange(self.longest)
        hidden = positions >= self.lengths[:, None]
        if window is not None:
            hidden |= positions < self.lengths[:, None] - window
        return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None, None, :]


@dataclass(frozen=True, slots=True)
class Block:
    """Query tokens ``rows`` of one request, at positions from ``start`` on, that see keys ``[0, end)`` of ``slot``."""

    slot: int
    rows: slice
    start: int
    end: int

    def mask(self, window: int | None) -> Tensor:
        """Return ``[queries, end]``: whether a query sees a key."""
        queries, keys = torch.arange(self.start, self.end)[:, None], torch.arange(self.end)
        seen = keys <= queries
        return seen if window is None else seen & (keys > queries - window)


class Step:
    """One forward pass over ``segments``."""

    def __init__(self, segments: list[Segment]) -> None:
        """Lay the segments out; ``order`` says which of them row ``b`` of the logits is of."""
        key = [(len(segment.tokens) > 1, segment.slot) for segment in segments]
        self.order = sorted(range(len(segments)), key=key.__getitem__)
        self.segments = [segments[index] for index in self.order]
        sizes = np.array([len(segment.tokens) for segment in self.segments])
        starts = np.array([segment.start for segment in self.segments])
        ends = sizes.cumsum()
        self.last = torch.from_numpy(ends - 1)
        """``[B]`` the last token of each request."""
        offsets = np.arange(int(ends[-1])) - np.repeat(ends - sizes, sizes)
        self.token_ids = torch.from_numpy(
            np.concatenate([segment.tokens for segment in self.segments]).astype(np.int64)
        )
        self.positions = torch.from_numpy(np.repeat(starts, sizes) + offsets)
        slots = np.array([segment.slot for segment in self.segments])
        self.slots = torch.from_numpy(np.repeat(slots, sizes))
        self.decoding = int((sizes == 1).sum())
        self.lay_runs(slots[: self.decoding], starts[: self.decoding])
        self.blocks = [
            Block(segment.slot, slice(row, row + size), start, start + size)
            for segment, end in zip(self.segments[self.decoding :], ends[self.decoding :], strict=True)
            for row, start, size in _blocks(int(end) - len(segment.tokens), segment.start, len(segment.tokens))
        ]
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def lay_runs(self, slots: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        """Group the decoding slots (ascending) into runs; ``place[d]`` is the row of decoding token ``d`` in them."""
        self.runs: list[Run] = []
        places: list[NDArray[np.int64]] = []
        rows = 0
        if len(slots):
            for part in np.split(np.arange(len(slots)), np.flatnonzero(np.diff(slots) > _GAP + 1) + 1):
                first, last = int(slots[part[0]]), int(slots[part[-1]]) + 1
                lengths = np.ones(last - first, np.int64)
                lengths[slots[part] - first] = starts[part] + 1
                places.append(rows + slots[part] - first)
                span = slice(rows, rows + last - first)
                self.runs.append(Run(first, last, span, torch.from_numpy(lengths), int(lengths.max())))
                rows = span.stop
        self.rows = rows
        """Rows that all runs have together."""
        self.place = torch.from_numpy(np.concatenate(places)) if places else torch.zeros(0, dtype=torch.long)

    @cached_property
    def dense(self) -> bool:
        """Whether no idle slot is computed along."""
        return self.rows == self.decoding

    def mask(self, index: int, window: int | None) -> Tensor:
        """Return the bias of run ``index``, or the mask of block ``index - len(runs)``; made once for all layers."""
        key = (index, window)
        if key not in self._masks:
            runs = len(self.runs)
            part = self.runs[index] if index < runs else self.blocks[index - runs]
            self._masks[key] = part.bias(window) if isinstance(part, Run) else part.mask(window)
        return self._masks[key]


def _blocks(row: int, start: int, count: int) -> list[tuple[int, int, int]]:
    return [(row + at, start + at, min(_BLOCK, count - at)) for at in range(0, count, _BLOCK)]
