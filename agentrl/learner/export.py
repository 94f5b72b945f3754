"""Export of whole weights in buckets, each one block of memory of which the weights are views, and their ways to engines.

CUDA memory is shared by handles made here: pickling a tensor would register its memory again for each weight sync, and the
registrations accumulate for the lifetime of the memory.
"""

from __future__ import annotations

import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch.multiprocessing import reductions
from torch.storage import TypedStorage
from typing_extensions import override

from agentrl.core.atomic_files import give_default_mode, names_file
from agentrl.core.errors import EngineError, LearnerError
from agentrl.distributed.base import TensorSpec, WeightGroup, tensor_spec
from agentrl.distributed.broadcast_group import BroadcastGroup, host_towards, open_store
from agentrl.distributed.flat_bucket import broadcast_as_one, order_by_alignment, serialize, total_bytes, views
from agentrl.distributed.sglang_loader.agentrl_weight_loaders import Changes, EncodedWeight, WeightChangesError, encode
from agentrl.learner.base import WeightBucket, WeightExport, WeightSource
from agentrl.learner.device import memory_to_share
from agentrl.models.engine_float8 import DTYPE as FLOAT8
from agentrl.models.engine_float8 import SCALE, EngineFloat8
from agentrl.models.weight_checksum import fingerprint
from agentrl.models.weight_files import is_always_float32

if TYPE_CHECKING:
    import torch


_shared_memory: dict[torch.device, SharedMemory] = {}
"""Memory with handles. torch never frees it (seen with 2.11 on an H200), so it is reused."""


class SharedMemory:
    """Bytes on a device, which other processes on the same device can open as tensors. Created by `reserve`."""

    @classmethod
    def reserve(cls, size: int, device: torch.device) -> SharedMemory:
        """Return memory of at least ``size`` bytes, which is valid until the next call.

        Raises:
            LearnerError: the device has too little memory.
        """
        memory = _shared_memory.get(device)
        return memory if memory is not None and len(memory.flat) >= size else cls(size, device)

    def __init__(self, size: int, device: torch.device) -> None:
        try:
            with memory_to_share(device):
                self.flat = torch.empty(size, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise LearnerError(
                f"the learner has no memory on {device} for a bucket of weights of {size >> 20:,} MiB; a smaller "
                f"weights.bucket_mib needs less: {str(error).splitlines()[0]}"
            ) from error
        self._copy: torch.Tensor | None = None
        self._shared: tuple[Any, ...] | None = None
        """Arguments that open it: device, handle, size, offset, the reference counter's file and offset, event, event sync."""

    def on_cpu(self, size: int) -> torch.Tensor:
        """Return the first ``size`` bytes on the CPU, overwritten by the next call."""
        if self.flat.device.type == "cpu":
            return self.flat[:size]
        if self._copy is None:
            self._copy = torch.empty(len(self.flat), dtype=torch.uint8, pin_memory=True)
        return self._copy[:size].copy_(self.flat[:size])

    def handle(self, size: int, specs: Sequence[TensorSpec]) -> str:
        """Return the bucket of ``specs`` in the first ``size`` bytes, which another process opens; see `serialize`.

        Raises:
            LearnerError: the memory is not on a GPU.
        """
        if self.flat.device.type != "cuda":
            raise LearnerError("the weights are not on a GPU, where another process could open them")
        shared = self._export()
        # Processes that open it see everything written so far.
        torch.cuda.current_stream(self.flat.device).synchronize()
        return serialize(SharedTensor(self.flat[:size], shared), specs)

    def _export(self) -> tuple[Any, ...]:
        if self._shared is None:
            _, *handle_args = self.flat.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
            # GPU numbers differ between processes. SGLang's patch of torch accepts a number or a UUID.
            uuid = str(torch.cuda.get_device_properties(self.flat.device).uuid)
            self._shared = (uuid, *handle_args)
            _shared_memory[self.flat.device] = self
        return self._shared


class SharedTensor:
    """Pickles as a tensor in shared memory."""

    def __init__(self, tensor: torch.Tensor, shared: tuple[Any, ...]) -> None:
        """Pickle ``tensor`` in memory that ``shared`` opens; see `SharedMemory`."""
        self._tensor = tensor
        self._shared = shared

    def __reduce__(self) -> tuple[Any, ...]:
        """See `torch.multiprocessing.reductions.reduce_tensor`, without the registration of the memory."""
        t = self._tensor
        tensor_args = (torch.Tensor, tuple(t.size()), t.stride(), t.storage_offset(), TypedStorage, t.dtype)
        device, handle, size, offset, *counter_and_event = self._shared
        return reductions.rebuild_cuda_tensor, (*tensor_args, device, handle, size, offset, False, *counter_and_event)


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The weights of one bucket."""

    specs: tuple[TensorSpec, ...]
    """In the order of their memory."""
    size: int
    """Bytes."""
    last: bool
    """Whether no bucket follows."""


_JOINED = ({"q_a_proj", "kv_a_proj_with_mqa", "g_proj"}, {"wq_a", "wkv", "wgate"})
"""Modules that SGLang's loaders join into one weight within a call; they drop a part without the others without an error.

The first are multi-head latent attention's (DeepSeek V3, Kimi K2, GLM-4.7-Flash, LongCat; with a gate dots3), the others
DeepSeek V4's.
"""
_SCALES = ("weight_scale_inv", "weight_scale", "input_scale")
"""Last parts of the names of the scales of a float8 weight: loaders multiply by them when they have both (DeepSeek V3.2)."""


def joined_name(name: str) -> str:
    """Return what is the same for all weights that an engine's loader joins: with them a weight travels in one bucket."""
    module, _, last = name.rpartition(".")
    parent, _, module_name = module.rpartition(".")
    joined = next(("+".join(sorted(names)) for names in _JOINED if module_name in names), module_name)
    return f"{parent}.{joined}.{'weight' if last in _SCALES else last}"


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[BucketPlan]:
    """Divide weights into buckets of at most ``bucket_bytes``; a larger weight gets a separate bucket.

    Weights that an engine's loader joins are in one bucket, in the place of the first of them.
    """
    units: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        units.setdefault(joined_name(spec.name), []).append(spec)
    parts: list[tuple[list[TensorSpec], int]] = []
    for unit in units.values():
        size = total_bytes(*unit)
        if parts and parts[-1][1] + size <= bucket_bytes:
            bucket_specs, bucket_size = parts[-1]
            parts[-1] = (bucket_specs + unit, bucket_size + size)
        else:
            parts.append((unit, size))
    return [
        BucketPlan(order_by_alignment(bucket_specs), size, number == len(parts))
        for number, (bucket_specs, size) in enumerate(parts, 1)
    ]


_QUANTIZED_TOGETHER = 256 << 20
"""Bytes of bfloat16 weights that are gathered together to be quantised, in addition to the bucket; a larger weight alone."""

SentWeights = dict[str, tuple[str, torch.Tensor]]
"""By weight: the name under which it was sent with `RankBucket.changes`, and a copy on the CPU."""


class RankBucket(WeightBucket):
    """The bucket on one rank. Valid until the next one is requested."""

    sender = 0

    def __init__(
        self,
        bucket_plan: BucketPlan,
        memory: SharedMemory,
        broadcast: Callable[[Sequence[torch.Tensor]], None],
        sent: SentWeights,
    ) -> None:
        """Hold the weights in ``memory``; those of `changes` are kept in ``sent``."""
        self.specs = bucket_plan.specs
        self.last = bucket_plan.last
        self._size = bucket_plan.size
        self._memory = memory
        self._broadcast = broadcast
        self._sent = sent

    def on_device(self) -> list[tuple[str, torch.Tensor]]:
        """Return the weights by name on the device where they were gathered."""
        return views(self.specs, self._memory.flat)

    @override
    def fingerprint(self) -> int:
        return fingerprint(self._memory.flat[: self._size])

    def cpu_bytes(self) -> torch.Tensor:
        """Return the weights as uint8 bytes on the CPU, which the next bucket overwrites."""
        return self._memory.on_cpu(self._size)

    @override
    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the weights on the CPU, where the next bucket overwrites them."""
        return views(self.specs, self.cpu_bytes())

    @override
    def save(self, file: Path) -> None:
        """Write the weights as safetensors."""
        with names_file(file):
            save_file(dict(self.tensors()), file, metadata={"format": "pt"})
        give_default_mode(file)

    @override
    def changes(self, base: str | None, version: str) -> Changes:
        encoded: dict[str, EncodedWeight] = {}
        for name, new in self.on_device():
            sent_version, old = self._sent.get(name, (None, None))
            if base is not None and sent_version != base:
                raise LearnerError(
                    f"the learner has no copy of {name} as it was sent in {base}, only of {sent_version}"
                )
            try:
                encoded[name] = encode(name, new, None if base is None or old is None else old.to(new.device))
            except WeightChangesError as error:
                raise LearnerError(str(error)) from error
            self._sent[name] = version, new.detach().clone().cpu() if old is None else old.copy_(new)
        # A loader that joins weights takes all of them, also those in which nothing has changed.
        changed = {joined_name(name) for name, (header, _) in encoded.items() if header.changed}
        sent = [weight for name, weight in encoded.items() if joined_name(name) in changed]
        pieces = [piece for _, weight_pieces in sent for piece in weight_pieces]
        payload = torch.cat(pieces).cpu() if pieces else torch.empty(0, dtype=torch.uint8)
        return Changes([header for header, _ in sent], payload)

    @override
    def broadcast(self) -> None:
        if broadcast_as_one(self.specs):
            self._broadcast([self._memory.flat[: self._size]])
        else:
            self._broadcast([tensor for _, tensor in self.on_device()])

    @override
    def ipc_handles(self) -> list[str]:
        return [self._memory.handle(self._size, self.specs)]


class NamedTensors(WeightSource):
    """Tensors by name."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Read ``tensors`` again for every bucket, so that they may change."""
        self.tensors = tensors

    @property
    @override
    def gathers_on(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @override
    def specs(self) -> Sequence[TensorSpec]:
        return [tensor_spec(*item) for item in self.tensors.items()]

    @override
    def gather(self, into: Sequence[tuple[str, torch.Tensor]]) -> None:
        torch._foreach_copy_([out for _, out in into], [self.tensors[name].detach() for name, _ in into])


def _gather_float8(source: WeightSource, into: Sequence[tuple[str, torch.Tensor]], form: EngineFloat8) -> None:
    """Write weights of which some are quantised, from bfloat16. Collective."""
    tensors = dict(into)
    names = [name for name in tensors if name + SCALE in tensors]
    scales = {name + SCALE for name in names}
    if unquantized := [(name, out) for name, out in into if name not in scales and name + SCALE not in tensors]:
        source.gather(unquantized)
    while names:
        count, size = 0, 0
        while count < len(names) and (not count or size + 2 * tensors[names[count]].numel() <= _QUANTIZED_TOGETHER):
            size += 2 * tensors[names[count]].numel()
            count += 1
        weights = [
            (name, torch.empty(tensors[name].shape, dtype=torch.bfloat16, device=source.gathers_on))
            for name in names[:count]
        ]
        source.gather(weights)
        for name, weight in weights:
            form.quantize(weight, tensors[name], tensors[name + SCALE])
        names = names[count:]


class WeightExporter(WeightExport):
    """Weight export of one process. Methods are collective.

    Used by every rank of a Ray learner, and a base class of in-process learners and of test and benchmark learners.
    """

    def __init__(self, source: WeightSource, adapters: Mapping[str, WeightSource] = MappingProxyType({})) -> None:
        """Export the weights of ``source``, and LoRA adapters by policy."""
        self._source = source
        self._adapters = adapters
        self._sent: SentWeights = {}
        self._lock = threading.Lock()
        self._store: object = None
        """The server of the group's store. It ends with this reference, and then processes that wait for it fail."""
        self._group: WeightGroup | None = None
        self._timeout_s = 0.0
        self._joined: BroadcastGroup | None = None

    @override
    def buckets(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[WeightBucket]:
        return self.gather_buckets(self._source, bucket_bytes, dtype)

    @override
    def buckets_by_sender(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[WeightBucket]:
        return self.buckets(bucket_bytes, dtype)

    def gather_buckets(self, source: WeightSource, bucket_bytes: int, dtype: str | None) -> Iterator[RankBucket]:
        """Iterate over the weights of a source, such as a stream; see `WeightExport.buckets`. Collective."""
        return self._gather(source, bucket_bytes, dtype, self._sent)

    @override
    def adapters(self, dtype: str | None = None, policy: str = "main") -> list[tuple[str, torch.Tensor]]:
        if policy not in self._adapters:
            return []
        dtype = "bfloat16" if dtype == FLOAT8 else dtype
        buckets = self._gather(self._adapters[policy], sys.maxsize, dtype, {})
        return [(name, tensor.clone()) for bucket in buckets for name, tensor in bucket.tensors()]

    def _gather(
        self, source: WeightSource, bucket_bytes: int, dtype: str | None, sent: SentWeights
    ) -> Iterator[RankBucket]:
        """Iterate over buckets, all in the same memory. Collective: every rank takes every bucket."""
        form = source.float8 if dtype == FLOAT8 else None
        dtype = "bfloat16" if form is not None else dtype
        specs = [
            spec
            if dtype is None or is_always_float32(spec.name) or spec.name in source.float32_weights
            else replace(spec, dtype=dtype)
            for spec in source.specs()
        ]
        if form is not None:
            specs = [sent_spec for spec in specs for sent_spec in form.sent_specs(spec)]
        bucket_plans = plan_buckets(specs, bucket_bytes)
        if not bucket_plans:
            return
        memory = SharedMemory.reserve(max(bucket_plan.size for bucket_plan in bucket_plans), source.gathers_on)
        for bucket_plan in bucket_plans:
            bucket = RankBucket(bucket_plan, memory, self._broadcast, sent)
            if form is None:
                source.gather(bucket.on_device())
            else:
                _gather_float8(source, bucket.on_device(), form)
            yield bucket

    @override
    def open_group(
        self, urls: Sequence[str], size: int, backend: str, timeout_s: float, sender: int = 0
    ) -> WeightGroup:
        self.leave_group()
        hosts = [host_towards(url) for url in urls]
        host = next((address for address in hosts if not address.startswith("127.")), "127.0.0.1")
        store = open_store(host, timeout_s)
        group = WeightGroup(f"agentrl-{uuid.uuid4().hex[:12]}", host, store.port, size, backend)
        with self._lock:
            self._store, self._group, self._timeout_s = store, group, timeout_s
        return group

    @override
    def join_group(self, group: WeightGroup, sender: int = 0) -> None:
        if self._group != group:
            raise EngineError(f"the group {group.name} was left")
        joined = BroadcastGroup.join(group, 0, timeout_s=self._timeout_s)
        with self._lock:
            if self._group == group:
                self._joined = joined
                return
        joined.close()
        raise EngineError(f"the group {group.name} was left while it was joined")

    def _broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast the tensors of a bucket, all on one device; see `WeightBucket.broadcast`."""
        joined = self._joined
        if joined is None:
            raise LearnerError("the rank has joined no group for weight sync")
        on = "cuda" if joined.group.backend == "nccl" else "cpu"
        if on == "cuda" and tensors[0].device.type != on:
            raise LearnerError("NCCL broadcasts from a GPU only, and the weights are on the CPU: the learner sleeps")
        joined.broadcast([tensor.to(on) for tensor in tensors])

    @override
    def leave_group(self) -> None:
        with self._lock:
            joined, self._joined, self._group = self._joined, None, None
            store, self._store = self._store, None
        if joined is not None:
            joined.close()
        del store
