"""Gathering of sharded weights, one collective for many of them, their Hugging Face names, and merging of LoRA adapters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from typing_extensions import override

from agentrl.config.learner import LoraConfig
from agentrl.core.lineup import MAIN
from agentrl.distributed.base import TensorSpec, tensor_spec
from agentrl.distributed.flat_bucket import ALIGNMENT
from agentrl.learner.base import WeightSource
from agentrl.learner.fsdp.lora import activate
from agentrl.learner.fsdp.sharding import rank_rows, shard_mesh
from agentrl.learner.fsdp.weights import (
    adapter_name,
    hf_name,
    is_adapter,
    is_policy_adapter,
    local,
    model_hub_tensors,
    peft_name,
)
from agentrl.models.hub_tensors import HubTensor, sent_buffers

_CHUNK_BYTES = 256 << 20
"""Bytes of the weights of one collective, unless a single weight is larger; its buffers take as much again."""

_Pair = tuple[torch.Tensor, torch.Tensor]
"""A weight, and the tensor that it is written into."""
_Shards = tuple[DTensor, torch.Tensor]
_Rows = tuple[DTensor, torch.Tensor, HubTensor]
"""A weight, the tensor that rows are written into, and the Hugging Face tensor that names the rows."""


def gather_weights(pairs: Iterable[_Pair]) -> None:
    """Write full weights, cast, into other tensors on the same device. Collective: all ranks call it with the same weights."""
    unsharded, sharded = [], []
    for weight, out in pairs:
        if not isinstance(weight, DTensor):
            unsharded.append((weight, out))
        elif shard_mesh(weight).size() == 1:
            unsharded.append((weight.to_local(), out))
        else:
            assert weight.placements[-1] == Shard(0), weight.placements
            sharded.append((weight, out))
    copy_all(unsharded)
    for chunk in _chunks(sharded):
        _all_gather(chunk)


def copy_all(pairs: Sequence[_Pair]) -> None:
    """Copy each first tensor into the second: on a GPU a few kernels for all of them, if their dtypes are the same."""
    if pairs:
        torch._foreach_copy_([out for _, out in pairs], [source for source, _ in pairs])


def _chunks(pairs: Sequence[_Shards]) -> Iterator[list[_Shards]]:
    chunk: list[_Shards] = []
    size = 0
    for pair in pairs:
        size += pair[1].nbytes
        if chunk and size > _CHUNK_BYTES:
            yield chunk
            chunk, size = [], pair[1].nbytes
        chunk.append(pair)
    if chunk:
        yield chunk


def _all_gather(pairs: Sequence[_Shards]) -> None:
    """Gather shards through two buffers, in which each shard has the same offset on every rank."""
    mesh, device = shard_mesh(pairs[0][0]), pairs[0][1].device
    rows = [rank_rows(weight) for weight, _ in pairs]
    longest = [max(shard.stop - shard.start for shard in shards) for shards in rows]
    sizes = [max(count, 1) * out[:1].nbytes for count, (_, out) in zip(longest, pairs, strict=True)]
    offsets = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
    send_buffer = torch.empty(offsets[-1], dtype=torch.uint8, device=device)

    def view_at(flat: torch.Tensor, offset: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return flat[offset : offset + like.numel() * dtype.itemsize].view(dtype).view(like.shape)

    shards = [(weight.to_local(), out.dtype) for weight, out in pairs]
    copy_all(
        [
            (shard, view_at(send_buffer, offset, shard, dtype))
            for (shard, dtype), offset in zip(shards, offsets, strict=False)
        ]
    )
    gathered = DTensor.from_local(send_buffer, mesh, (Shard(0),), run_check=False).full_tensor()
    rank_buffers = gathered.chunk(mesh.size())
    copies = []
    for (_, out), shard_rows, offset in zip(pairs, rows, offsets, strict=False):
        for flat, row_slice in zip(rank_buffers, shard_rows, strict=True):
            if len(out_rows := out[row_slice]):
                copies.append((view_at(flat, offset, out_rows, out.dtype), out_rows))
    copy_all(copies)


def gather_rows(rows: Sequence[_Rows]) -> None:
    """Write rows of sharded weights, cast, into other tensors. Collective, as `gather_weights`.

    Consecutive rows are mostly those of one rank, such as an expert, so each rank broadcasts what it has.
    """
    pairs = [(weight, out) for weight, out, _ in rows]
    first = 0
    for chunk in _chunks(pairs):
        _broadcast(rows[first : first + len(chunk)])
        first += len(chunk)


def _broadcast(rows: Sequence[_Rows]) -> None:
    mesh, device = shard_mesh(rows[0][0]), rows[0][1].device
    pairs_by_rank: dict[int, list[tuple[torch.Tensor | None, torch.Tensor]]] = defaultdict(list)
    for weight, out, tensor in rows:
        assert weight.placements[-1] == Shard(0), weight.placements
        lines = weight.shape[1:-1].numel()
        for rank, row_slice in enumerate(rank_rows(weight)):
            local_lines, out_lines = tensor.overlap(row_slice.start * lines, (row_slice.stop - row_slice.start) * lines)
            if out_lines.start == out_lines.stop:
                continue
            local_rows = weight.to_local().flatten(0, -2)[local_lines] if rank == mesh.get_local_rank() else None
            pairs_by_rank[rank].append((local_rows, out.flatten(0, -2)[out_lines]))
    for rank, pairs in pairs_by_rank.items():
        ends = accumulate(-(-out.nbytes // ALIGNMENT) * ALIGNMENT for _, out in pairs)
        offsets = [0, *ends]
        flat = torch.empty(offsets[-1], dtype=torch.uint8, device=device)
        copies = [
            flat[offset : offset + out.nbytes].view(out.dtype).view(out.shape)
            for offset, (_, out) in zip(offsets, pairs, strict=False)
        ]
        copy_all(
            [(local_rows, copy) for (local_rows, _), copy in zip(pairs, copies, strict=True) if local_rows is not None]
        )
        dist.broadcast(flat, group=mesh.get_group(), group_src=rank)
        copy_all([(copy, out) for copy, (_, out) in zip(copies, pairs, strict=True)])


class MergedWeights:
    """The weights of a model, with adapters merged, ``W + scale B A`` in float32, and the tensors of its Hugging Face folder.

    Adapters of `LoraConfig.policies` with names are not merged: the weights are those of the base model.

    Args:
        hf: with adapters or without.
        config: of the adapters; None for a model without.
    """

    def __init__(self, hf: nn.Module, config: LoraConfig | None) -> None:
        named = dict(hf.named_parameters())
        self.adapters = {name: parameter for name, parameter in named.items() if is_adapter(name)}
        self.base: dict[str, torch.Tensor] = {
            hf_name(name): parameter for name, parameter in named.items() if not is_adapter(name)
        }
        policies = config.policies if config is not None else []
        self.policies = policies or [MAIN]
        self._pairs = {
            hf_name(name): (named[adapter_name(name, "A", policies[0])], named[adapter_name(name, "B", policies[0])])
            for name in named
            if policies == [MAIN] and not is_adapter(name) and adapter_name(name, "A", policies[0]) in self.adapters
        }
        self.tensors = {tensor.name: tensor for tensor in model_hub_tensors(hf)}
        """The tensors of a Hugging Face folder, by name: those of `base`, and buffers."""
        self._buffers = sent_buffers(hf)
        self._scale = config.alpha / config.rank if config is not None else 0.0
        self.exported = {
            policy: {peft_name(name, policy): name for name in self.adapters if is_policy_adapter(name, policy)}
            for policy in policies
        }
        """By policy: the names of its adapters in the model, by those in a PEFT folder."""
        self._hf = hf

    def activate(self, policy: str) -> None:
        """See `lora.activate`; without adapters this does nothing."""
        if self.exported:
            activate(self._hf, policy)

    def specs(self) -> list[TensorSpec]:
        """Return names, dtypes and shapes of the Hugging Face tensors of `base`, and of `sent_buffers`."""
        weights = self.base | self._buffers
        return [
            TensorSpec(tensor.name, tensor_spec("", weights[tensor.weight]).dtype, tensor.shape)
            for tensor in self.tensors.values()
            if tensor.weight in weights
        ]

    def gather(
        self, into: Sequence[tuple[str, torch.Tensor]], readable: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Write Hugging Face tensors, or some of `adapters`, into tensors on their device; see `gather_weights`, and `get`."""
        full_weights: list[_Pair] = []
        rows: list[_Rows] = []
        weight, gathered_name = torch.empty(0), ""
        for name, out in into:
            tensor = self.tensors.get(name)
            weight_name = name if tensor is None else tensor.weight
            if weight_name != gathered_name:
                weight, gathered_name = self.get(weight_name, readable), weight_name
            if tensor is None or tensor.is_whole:
                full_weights.append((weight, out))
            elif isinstance(weight, DTensor) and shard_mesh(weight).size() > 1:
                rows.append((weight, out, tensor))
            else:
                full_weights.append((tensor.slice_weight(local(weight)), out))
        gather_weights(full_weights)
        gather_rows(rows)

    def get(self, name: str, readable: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return a weight, sharded as the model's. Collective if it has an adapter: all ranks get ``A``.

        Args:
            name: of `base`, of `adapters`, or of a buffer, which is always in memory.
            readable: returns a tensor of the model in readable memory.
        """
        if name in self._buffers:
            return self._buffers[name]
        weight = readable(self.adapters[name] if name in self.adapters else self.base[name])
        if name not in self._pairs:
            return weight
        a, b = (readable(matrix) for matrix in self._pairs[name])
        full_a = a.full_tensor() if isinstance(a, DTensor) else a
        merged = local(weight) + self._scale * (local(b) @ full_a)
        if not isinstance(weight, DTensor):
            return merged
        return DTensor.from_local(
            merged, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )


class AdapterWeights(WeightSource):
    """A policy's adapters of a rank, by their names in a PEFT folder."""

    def __init__(self, rank: WeightSource, weights: MergedWeights, policy: str) -> None:
        self._rank = rank
        self._adapters = weights.adapters
        self._names = weights.exported[policy]

    @property
    @override
    def gathers_on(self) -> torch.device:
        return self._rank.gathers_on

    @override
    def specs(self) -> Sequence[TensorSpec]:
        return [tensor_spec(name, self._adapters[inner]) for name, inner in self._names.items()]

    @override
    def gather(self, into: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._rank.gather([(self._names[name], out) for name, out in into])
