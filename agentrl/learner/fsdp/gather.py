"""Gathering of sharded weights, one collective for many of them, their Hugging Face names, and merging of LoRA adapters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from agentrl.config.learner import LoraConfig
from agentrl.core.lineup import MAIN
from agentrl.distributed.base import TensorSpec, tensor_spec
from agentrl.distributed.flat_bucket import ALIGNMENT
from agentrl.learner.base import WeightSource
from agentrl.learner.fsdp.lora import activate
from agentrl.learner.fsdp.weights import (
    adapter_name,
    hf_name,
    is_adapter,
    is_policy_adapter,
    local,
    model_hub_tensors,
    peft_name,
)
from agentrl.models.hub_tensors import HubTensor

_PART_BYTES = 256 << 20
"""Weights of one collective, at least one; further memory as large is needed for it."""

_Pair = tuple[torch.Tensor, torch.Tensor]
"""A weight, and the tensor that it is written into."""
_Shards = tuple[DTensor, torch.Tensor]
_Rows = tuple[DTensor, torch.Tensor, HubTensor]
"""A weight, the tensor that some of its rows are written into, and which rows."""


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


def gather_rows(rows: Sequence[_Rows]) -> None:
    """Write rows of sharded weights, cast, into other tensors. Collective, as `gather_weights`.

    Consecutive rows are mostly those of one rank, such as an expert, so each rank broadcasts what it has.
    """
    sized = [(weight, out) for weight, out, _ in rows]
    begin = 0
    for part in _parts(sized):
        _broadcast(rows[begin : begin + len(part)])
        begin += len(part)


def _broadcast(part: Sequence[_Rows]) -> None:
    mesh, device = part[0][0].device_mesh, part[0][1].device
    found: dict[int, list[tuple[torch.Tensor | None, torch.Tensor]]] = defaultdict(list)
    for weight, out, tensor in part:
        assert weight.placements == (Shard(0),), weight.placements
        share = -(-len(weight) // mesh.size()) * weight[0].shape[:-1].numel()
        for rank in range(tensor.first // share, (tensor.first + tensor.rows - 1) // share + 1):
            here, there = tensor.overlap(rank * share, share)
            own = weight.to_local().flatten(0, -2)[here] if rank == mesh.get_local_rank() else None
            found[rank].append((own, out.flatten(0, -2)[there]))
    for rank, pairs in found.items():
        ends = accumulate(-(-out.nbytes // ALIGNMENT) * ALIGNMENT for _, out in pairs)
        begins = [0, *ends]
        flat = torch.empty(begins[-1], dtype=torch.uint8, device=device)
        copies = [
            flat[begin : begin + out.nbytes].view(out.dtype).view(out.shape)
            for begin, (_, out) in zip(begins, pairs, strict=False)
        ]
        copy_all([(own, copy) for (own, _), copy in zip(pairs, copies, strict=True) if own is not None])
        dist.broadcast(flat, group=mesh.get_group(), group_src=rank)
        copy_all([(copy, out) for copy, (_, out) in zip(copies, pairs, strict=True)])


class MergedWeights:
    """The weights of a model, with adapters merged, ``W + scale B A`` in float32, and the tensors of its Hugging Face folder.

    Policies with names are not merged: the weights are those of the base model.

    Args:
        hf: with adapters or without.
        config: of the adapters; None for a model without.

    """

    def __init__(self, hf: nn.Module, config: LoraConfig | None) -> None:
        named = dict(hf.named_parameters())
        self.adapters = {name: parameter for name, parameter in named.items() if is_adapter(name)}
        self.base = {hf_name(name): parameter for name, parameter in named.items() if not is_adapter(name)}
        policies = config.policies if config is not None else []
        self.policies = policies or [MAIN]
        """Names of the policies."""
        self._pairs = {
            hf_name(name): (named[adapter_name(name, "A", policies[0])], named[adapter_name(name, "B", policies[0])])
            for name in named
            if policies == [MAIN] and not is_adapter(name) and adapter_name(name, "A", policies[0]) in self.adapters
        }
        self.tensors = {tensor.name: tensor for tensor in model_hub_tensors(hf)}
        """The tensors of a Hugging Face folder, by name: those of `base`, and buffers."""
        self._scale = config.alpha / config.rank if config is not None else 0.0
        self.exported = {
            policy: {peft_name(name, policy): name for name in self.adapters if is_policy_adapter(name, policy)}
            for policy in policies
        }
        """By policy: the names of its adapters in the model, by those in a PEFT folder."""
        self._hf = hf

    def activate(self, policy: str) -> None:
        """Compute with the adapters of a policy from now on, if the model has adapters; the others' get no gradient."""
        if self.exported:
            activate(self._hf, policy)

    def specs(self) -> list[TensorSpec]:
        """Return names, dtypes and shapes of the Hugging Face tensors of `base`."""
        trained = [tensor for tensor in self.tensors.values() if tensor.weight in self.base]
        return [TensorSpec(each.name, tensor_spec("", self.base[each.weight]).dtype, each.shape) for each in trained]

    def gather(self, into: Sequence[tuple[str, torch.Tensor]], present: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Write Hugging Face tensors, or some of `adapters`, into tensors on their device; see `gather_weights`, and `get`."""
        whole: list[_Pair] = []
        rows: list[_Rows] = []
        weight, found = torch.empty(0), ""
        for name, out in into:
            tensor = self.tensors.get(name)
            wanted = name if tensor is None else tensor.weight
            if wanted != found:
                weight, found = self.get(wanted, present), wanted
            if tensor is None or tensor.is_whole:
                whole.append((weight, out))
            elif isinstance(weight, DTensor) and weight.device_mesh.size() > 1:
                rows.append((weight, out, tensor))
            else:
                whole.append((tensor.slice_weight(local(weight)), out))
        gather_weights(whole)
        gather_rows(rows)

    def get(self, name: str, present: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return a weight, sharded as the model's. Collective if it has an adapter: all ranks get ``A``.

        Args:
            name: of `base`, or of `adapters`.
            present: returns a tensor of the model in readable memory.

        """
        weight = present(self.adapters[name] if name in self.adapters else self.base[name])
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
    """Implements `agentrl.learner.base.WeightSource` over a policy's adapters of a rank."""

    def __init__(self, rank: WeightSource, weights: MergedWeights, policy: str) -> None:
        """Gather by ``rank``, which knows the names of `MergedWeights.adapters`."""
        self._rank = rank
        self._adapters = weights.adapters
        self._names = weights.exported[policy]

    @property
    def gathers_on(self) -> torch.device:
        """See `WeightSource.gathers_on`."""
        return self._rank.gathers_on

    def specs(self) -> Sequence[TensorSpec]:
        """Return names, dtypes and shapes of the adapters."""
        return [tensor_spec(name, self._adapters[inner]) for name, inner in self._names.items()]

    def gather(self, into: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Write adapters into tensors; see `WeightSource.gather`."""
        self._rank.gather([(self._names[name], out) for name, out in into])
