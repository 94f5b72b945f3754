"""How the weights of a Megatron-Core model are made of Hugging Face tensors, and which slices of them a rank has.

A `Weight` lists rows of Hugging Face tensors. A tensor-parallel rank has slices of these tensors, and each slice is a
range of rows of the rank's weight. Loading reads the slices, gathering writes them: one mapping serves both directions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple


class HfTensor(NamedTuple):
    """A tensor of a Hugging Face folder."""

    name: str
    shape: tuple[int, ...]


class Rows(NamedTuple):
    """Rows of a Hugging Face tensor."""

    tensor: HfTensor
    start: int
    stop: int


class WeightSlice(NamedTuple):
    """A slice of a Hugging Face tensor, and its place in a rank's weight."""

    tensor: HfTensor
    hf_slices: tuple[slice, ...]
    """In the Hugging Face tensor."""
    local_index: tuple[int | slice, ...]
    """Rows of the rank's weight, of stacked weights after the expert's index."""

    def stacked_at(self, index: int) -> WeightSlice:
        """Return the slice in stacked weights of experts."""
        return self._replace(local_index=(index, *self.local_index))


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter or buffer of a Megatron-Core model."""

    name: str
    """In its layer, expert or model."""
    blocks: tuple[tuple[Rows, ...], ...]
    """The rows of a block follow each other. A rank has its rows of each block, one block after the other."""
    split: Literal["rows", "columns"] | None = "rows"
    """What tensor-parallel ranks divide; None if each has the whole weight."""
    dtype: str | None = None
    """Of a weight whose dtype is not the model's."""

    def tensors(self) -> Iterator[HfTensor]:
        """Iterate over the Hugging Face tensors, each once."""
        yield from dict.fromkeys(rows.tensor for block in self.blocks for rows in block)

    def slices(self, rank: int, size: int) -> Iterator[WeightSlice]:
        """Iterate over the slices of one of ``size`` tensor-parallel ranks."""
        begin = 0
        for block in self.blocks:
            rows = _rank_rows(block, rank, size) if self.split == "rows" else block
            for tensor, start, stop in rows:
                hf_slices = (slice(start, stop), *map(slice, tensor.shape[1:]))
                if self.split == "columns":
                    hf_slices = (hf_slices[0], _range(tensor.shape[1], rank, size))
                yield WeightSlice(tensor, hf_slices, (slice(begin, begin + stop - start),))
                begin += stop - start


def _range(length: int, rank: int, size: int) -> slice:
    assert length % size == 0, f"{length} not divisible by {size}"
    count = length // size
    return slice(rank * count, (rank + 1) * count)


def _rank_rows(block: Iterable[Rows], rank: int, size: int) -> Iterator[Rows]:
    """Iterate over a rank's rows of a block."""
    block = tuple(block)
    rank_range = _range(sum(rows.stop - rows.start for rows in block), rank, size)
    begin = 0
    for tensor, start, stop in block:
        first, last = max(rank_range.start - begin, 0), min(rank_range.stop - begin, stop - start)
        if first < last:
            yield Rows(tensor, start + first, start + last)
        begin += stop - start


def all_rows(tensor: HfTensor) -> tuple[Rows, ...]:
    """Return a block of a whole tensor."""
    return (Rows(tensor, 0, tensor.shape[0]),)


def same(
    name: str, tensor: HfTensor, split: Literal["rows", "columns"] | None = None, dtype: str | None = None
) -> Weight:
    """Return a weight that is one Hugging Face tensor."""
    return Weight(name, (all_rows(tensor),), split, dtype)


def gate_up(name: str, gate: HfTensor, up: HfTensor) -> Weight:
    """Return the first weight of a gated MLP: a rank has its rows of the gate projection, then those of the up projection."""
    return Weight(name, (all_rows(gate), all_rows(up)))


def fused_gate_up(name: str, tensor: HfTensor) -> Weight:
    """Return the first weight of a gated MLP from a Hugging Face tensor with both projections."""
    half = tensor.shape[0] // 2
    return Weight(name, ((Rows(tensor, 0, half),), (Rows(tensor, half, 2 * half),)))


def grouped_qkv(name: str, query: HfTensor, key: HfTensor, value: HfTensor, groups: int) -> Weight:
    """Return the projection to queries, keys and values: of each group of heads the queries, the key and the value."""
    rows: list[Rows] = []
    for group in range(groups):
        for tensor in (query, key, value):
            size = tensor.shape[0] // groups
            rows.append(Rows(tensor, group * size, (group + 1) * size))
    return Weight(name, (tuple(rows),))
