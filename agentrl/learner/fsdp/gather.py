"""Gathering of sharded weights, one collective for many of them, and merging of LoRA adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from agentrl.config.learner import LoraConfig
from agentrl.distributed.base import TensorSpec, spec_of
from agentrl.distributed.flat_bucket import ALIGNMENT
from agentrl.learner.base import WeightSource
from agentrl.learner.fsdp.weights import adapter_name, hf_name, is_adapter, local, peft_name

_PART_BYTES = 256 << 20
"""Weights of one collective, at least one; further memory as large is needed for it."""

_Pair = tuple[torch.Tensor, torch.Tensor]
"""A weight, and the tensor that it is written into."""
_Shards = tuple[DTensor, torch.Tensor]


def gather_weights(pairs: Iterable[_Pair]) -> None:
    """Write whole weights, cast, into other tensors on the same device. Collective: all ranks call it with the same weights."""
    there, sharded = [], []
    for weight, out in pairs:
        if not isinstance(weight, DTensor):
            there.append((weight, out))
        elif weight.device_mesh.size() == 1:
            there.append((weight.to_local(), out))
        else:
            assert weight.placements == (Shard(0),), weight.placements
            sharded.append((weight, out))
    copy_all(there)
    for part in _parts(sharded):
        _all_gather(part)


def copy_all(pairs: Sequence[_Pair]) -> None:
    """Copy each first tensor into the second: on a GPU a few kernels for all of them, if their dtypes are alike."""
    if pairs:
        torch._foreach_copy_([out for _, out in pairs], [source for source, _ in pairs])


def _parts(pairs: Sequence[_Shards]) -> Iterator[list[_Shards]]:
    part: list[_Shards] = []
    size = 0
    for pair in pairs:
        size += pair[1].nbytes
        if part and size > _PART_BYTES:
            yield part
            part, size = [], pair[1].nbytes
        part.append(pair)
    if part:
        yield part


def _all_gather(part: Sequence[_Shards]) -> None:
    """Gather shards through two buffers in which each begins at the same place on every rank."""
    mesh, device = part[0][0].device_mesh, part[0][1].device
    # As FSDP divides: the same number of rows for each rank, fewer or none for the last ones.
    rows = [max(-(-len(out) // mesh.size()), 1) for _, out in part]
    sizes = [count * out[:1].nbytes for count, (_, out) in zip(rows, part, strict=True)]
    begins = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
    own = torch.empty(begins[-1], dtype=torch.uint8, device=device)

    def at(flat: torch.Tensor, begin: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return flat[begin : begin + like.numel() * dtype.itemsize].view(dtype).view(like.shape)

    shards = [(weight.to_local(), out.dtype) for weight, out in part]
    copy_all([(shard, at(own, begin, shard, dtype)) for (shard, dtype), begin in zip(shards, begins, strict=False)])
    found = DTensor.from_local(own, mesh, (Shard(0),), run_check=False).full_tensor()
    ranks = found.chunk(mesh.size())
    copies = []
    for (_, out), count, begin in zip(part, rows, begins, strict=False):
        for flat, piece in zip(ranks, torch.split(out, count), strict=False):
            copies.append((at(flat, begin, piece, out.dtype), piece))
    copy_all(copies)


class MergedWeights:
    """The weights of a model by Hugging Face name, with adapters merged: ``W + scale B A`` in float32.

    Args:
        hf: with adapters or without.
        config: of the adapters; None for a model without.

    """

    def __init__(self, hf: nn.Module, config: LoraConfig | None) -> None:
        named = dict(hf.named_parameters())
        self.adapters = {name: parameter for name, parameter in named.items() if is_adapter(name)}
        self.base = {hf_name(name): parameter for name, parameter in named.items() if not is_adapter(name)}
        self._pairs = {
            hf_name(name): (named[adapter_name(name, "A")], named[adapter_name(name, "B")])
            for name in named
            if not is_adapter(name) and adapter_name(name, "A") in self.adapters
        }
        self._scale = config.alpha / config.rank if config is not None else 0.0
        self.exported = {peft_name(name): adapter for name, adapter in self.adapters.items()}
        """The adapters by their names in a PEFT folder."""

    def get(self, name: str, present: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return a weight, sharded as the model's. Collective if it has an adapter: all ranks get ``A``.

        Args:
            name: of Hugging Face, or of `exported`.
            present: returns a tensor of the model in readable memory.

        """
        weight = present(self.exported[name] if name in self.exported else self.base[name])
        if name not in self._pairs:
            return weight
        a, b = (present(each) for each in self._pairs[name])
        whole_a = a.full_tensor() if isinstance(a, DTensor) else a
        merged = local(weight) + self._scale * (local(b) @ whole_a)
        if not isinstance(weight, DTensor):
            return merged
        return DTensor.from_local(
            merged, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )


class AdapterWeights:
    """Implements `agentrl.learner.base.WeightSource` over the adapters of a rank."""

    def __init__(self, rank: WeightSource, weights: MergedWeights) -> None:
        """Gather by ``rank``, which knows the names of `MergedWeights.exported`."""
        self._rank = rank
        self._adapters = weights.exported

    @property
    def gathers_on(self) -> torch.device:
        """See `WeightSource.gathers_on`."""
        return self._rank.gathers_on

    def specs(self) -> Sequence[TensorSpec]:
        """Return names, dtypes and shapes of the adapters."""
        return [spec_of(*item) for item in self._adapters.items()]

    def gather(self, into: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Write adapters into tensors; see `WeightSource.gather`."""
        self._rank.gather(into)
