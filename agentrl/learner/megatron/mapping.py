"""How the weights of a Megatron-Core model are made of Hugging Face tensors, and which part of them a rank has.

A `Weight` lists rows of Hugging Face tensors. Its parts for a tensor-parallel rank are slices of these tensors, each of which
is a range of rows of the rank's weight. Loading reads the slices, gathering writes them: one mapping serves both directions.
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


class Part(NamedTuple):
    """Where a slice of a Hugging Face tensor is in a rank's weight."""

    tensor: HfTensor
    there: tuple[slice, ...]
    """In the Hugging Face tensor."""
    here: tuple[int | slice, ...]
    """Rows of the rank's weight, of stacked weights after the expert's index."""

    def of_expert(self, index: int) -> Part:
        """Return the part in stacked weights of experts."""
        return self._replace(here=(index, *self.here))


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter or buffer of a Megatron-Core model."""

    name: str
    """In its layer, expert or model."""
    blocks: tuple[tuple[Rows, ...], ...]
    """The rows of a block follow each other. A rank has its part of each block, one after the other."""
    split: Literal["rows", "columns"] | None = "rows"
    """What tensor-parallel ranks divide; None if each has the whole weight."""
    dtype: str | None = None
    """Of a weight that does not have the model's."""

    def tensors(self) -> Iterator[HfTensor]:
        """Iterate over the Hugging Face tensors, each once."""
        yield from dict.fromkeys(rows.tensor for block in self.blocks for rows in block)

    def parts(self, rank: int, size: int) -> Iterator[Part]:
        """Iterate over the parts of one of ``size`` tensor-parallel ranks."""
        begin = 0
        for block in self.blocks:
            taken = _share(block, rank, size) if self.split == "rows" else block
            for tensor, start, stop in taken:
                there = (slice(start, stop), *map(slice, tensor.shape[1:]))
                if self.split == "columns":
                    there = (there[0], _range(tensor.shape[1], rank, size))
                yield Part(tensor, there, (slice(begin, begin + stop - start),))
                begin += stop - start


def _range(length: int, rank: int, size: int) -> slice:
    assert length % size == 0, f"{length} not divisible by {size}"
    share = length // size
    return slice(rank * share, (rank + 1) * share)


def _share(block: Iterable[Rows], rank: int, size: int) -> Iterator[Rows]:
    """Iterate over a rank's rows of a block."""
    block = tuple(block)
    wanted = _range(sum(rows.stop - rows.start for rows in block), rank, size)
    begin = 0
    for tensor, start, stop in block:
        first, last = max(wanted.start - begin, 0), min(wanted.stop - begin, stop - start)
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
    """Return the first weight of a gated MLP: a rank has its part of the gate, then that of the other projection."""
    return Weight(name, (all_rows(gate), all_rows(up)))


def fused_gate_up(name: str, tensor: HfTensor) -> Weight:
    """Return the first weight of a gated MLP from one Hugging Face tensor that has both projections."""
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
