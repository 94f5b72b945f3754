"""The input of one forward pass: new tokens of many requests, concatenated, and the KV slot of each token.

Shapes: ``N`` tokens of ``B`` requests. Requests with one new token (decoding) come first, sorted by slot; requests with
more (a prompt, or the tokens of an observation) follow. There is no padding, so linear layers compute nothing in vain.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from agentrl.inference.embedded.images import SegmentImage

_MAX_GAP = 2
"""Largest gap of idle slots that one attention call of decoding slots computes along; a larger one starts a new call."""
_BLOCK_TOKENS = 512
"""Query tokens of one attention call of a long prompt: bounds the mask and skips most of the masked keys."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The new tokens of one request."""

    slot: int
    start: int
    """Position of the first one: the number of tokens whose keys and values the slot has."""
    tokens: NDArray[np.int32]
    kept: int = 1
    """Number of last tokens whose logits are computed."""
    rotary: NDArray[np.int64] | None = None
    """``[axes, n]`` rotary positions of the tokens; None: those of text."""
    images: tuple[SegmentImage, ...] = ()
    """Images whose features stand among the tokens."""


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Adjacent decoding slots ``[first, last)``, so that their cache is one view, and their rows; see ``decode_rows``."""

    first: int
    last: int
    rows: slice
    lengths: Tensor
    """``[R]`` number of keys that each slot's query attends to, its own included; 1 for idle slots in between."""
    longest: int

    def bias(self, window: int | None) -> Tensor:
        """Return the bias of the scores, ``[R, 1, 1, longest]``: 0 if the query attends to the key, else -inf."""
        positions = torch.arange(self.longest)
        hidden = positions >= self.lengths[:, None]
        if window is not None:
            hidden |= positions < self.lengths[:, None] - window
        return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None, None, :]


@dataclass(frozen=True, slots=True)
class PrefillBlock:
    """Query tokens ``rows`` of one request, at positions ``[start, end)``; they attend to keys ``[0, end)`` of ``slot``."""

    slot: int
    rows: slice
    start: int
    end: int

    def mask(self, window: int | None) -> Tensor:
        """Return the boolean mask ``[queries, end]``: whether a query attends to a key."""
        queries, keys = torch.arange(self.start, self.end)[:, None], torch.arange(self.end)
        seen = keys <= queries
        return seen if window is None else seen & (keys > queries - window)


class ForwardBatch:
    """The tokens, positions, slots and attention blocks of one forward pass over ``segments``."""

    def __init__(self, segments: list[Segment]) -> None:
        """Sort and concatenate the segments; ``order[b]`` is the index of segment ``b`` of the batch in ``segments``."""
        key = [(len(segment.tokens) > 1, segment.slot) for segment in segments]
        self.order = sorted(range(len(segments)), key=key.__getitem__)
        self.segments = [segments[index] for index in self.order]
        sizes = np.array([len(segment.tokens) for segment in self.segments])
        starts = np.array([segment.start for segment in self.segments])
        ends = sizes.cumsum()
        logit_counts = np.array([segment.kept for segment in self.segments])
        logit_rows = np.repeat(ends - logit_counts.cumsum(), logit_counts) + np.arange(int(logit_counts.sum()))
        self.kept = torch.from_numpy(logit_rows)
        """``[K]`` index of each token whose logits are computed: of most requests the last."""
        offsets = np.arange(int(ends[-1])) - np.repeat(ends - sizes, sizes)
        self.token_ids = torch.from_numpy(
            np.concatenate([segment.tokens for segment in self.segments]).astype(np.int64)
        )
        self.positions = torch.from_numpy(np.repeat(starts, sizes) + offsets)
        """``[N]`` position of each token in its slot."""
        self.rotary = self._rotary(ends)
        """``[axes, N]`` rotary positions; ``[1, N]`` if they are those of text for all."""
        self.images = [
            (image, torch.from_numpy(image.rows + int(end) - len(segment.tokens)))
            for segment, end in zip(self.segments, ends, strict=True)
            for image in segment.images
        ]
        """Images and ``[n]`` rows of the tokens at which their features stand."""
        slots = np.array([segment.slot for segment in self.segments])
        self.slots = torch.from_numpy(np.repeat(slots, sizes))
        self.decoding = int((sizes == 1).sum())
        self._group_decoding_slots(slots[: self.decoding], starts[: self.decoding])
        self.blocks = [
            PrefillBlock(segment.slot, slice(row, row + size), start, start + size)
            for segment, end in zip(self.segments[self.decoding :], ends[self.decoding :], strict=True)
            for row, start, size in _blocks(int(end) - len(segment.tokens), segment.start, len(segment.tokens))
        ]
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def _rotary(self, ends: NDArray[np.int64]) -> Tensor:
        axes = [len(segment.rotary) for segment in self.segments if segment.rotary is not None]
        if not axes:
            return self.positions[None]
        rotary = self.positions.repeat(axes[0], 1)
        for segment, end in zip(self.segments, ends, strict=True):
            if segment.rotary is not None:
                rotary[:, int(end) - len(segment.tokens) : int(end)] = torch.from_numpy(segment.rotary)
        return rotary

    def _group_decoding_slots(self, slots: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        """Group the decoding slots (ascending) into runs; ``decode_rows[d]`` is the row of decoding token ``d`` in them."""
        self.runs: list[DecodeRun] = []
        row_indices: list[NDArray[np.int64]] = []
        rows = 0
        if len(slots):
            for group in np.split(np.arange(len(slots)), np.flatnonzero(np.diff(slots) > _MAX_GAP + 1) + 1):
                first, last = int(slots[group[0]]), int(slots[group[-1]]) + 1
                lengths = np.ones(last - first, np.int64)
                lengths[slots[group] - first] = starts[group] + 1
                row_indices.append(rows + slots[group] - first)
                span = slice(rows, rows + last - first)
                self.runs.append(DecodeRun(first, last, span, torch.from_numpy(lengths), int(lengths.max())))
                rows = span.stop
        self.rows = rows
        """Rows of all runs, idle slots included."""
        self.decode_rows = (
            torch.from_numpy(np.concatenate(row_indices)) if row_indices else torch.zeros(0, dtype=torch.long)
        )

    @cached_property
    def dense(self) -> bool:
        """Whether the runs have no idle slots."""
        return self.rows == self.decoding

    def mask(self, index: int, window: int | None) -> Tensor:
        """Return the bias of run ``index``, or the mask of block ``index - len(runs)``; computed once for all layers."""
        key = (index, window)
        if key not in self._masks:
            runs = len(self.runs)
            self._masks[key] = self.runs[index].bias(window) if index < runs else self.blocks[index - runs].mask(window)
        return self._masks[key]


def _blocks(row: int, start: int, count: int) -> list[tuple[int, int, int]]:
    return [(row + at, start + at, min(_BLOCK_TOKENS, count - at)) for at in range(0, count, _BLOCK_TOKENS)]
