"""Buckets of whole weights: each is one block of memory of which the weights are views."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from typing_extensions import override

from agentrl.core.errors import LearnerError
from agentrl.core.file_modes import give_default_mode
from agentrl.distributed.base import TensorSpec, tensor_spec
from agentrl.distributed.flat_bucket import broadcast_as_one, order_by_alignment, total_bytes, views
from agentrl.distributed.sglang_loader.agentrl_weight_delta import Changes, EncodedWeight, WeightChangesError, encode
from agentrl.learner.base import WeightBucket, WeightSource
from agentrl.learner.export.broadcaster import WeightBroadcaster
from agentrl.learner.export.cuda_ipc import SharedMemory
from agentrl.models.weight_checksum import fingerprint
from agentrl.models.weight_files import is_always_float32


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The weights of one bucket."""

    specs: tuple[TensorSpec, ...]
    """In the order of their memory."""
    size: int
    """Bytes."""
    last: bool
    """Whether no bucket follows."""


_JOINED = ({"q_a_proj", "kv_a_proj_with_mqa"}, {"wq_a", "wkv", "wgate"})
"""Modules that SGLang's loaders join into one weight within a call; they drop a part without the others without an error.

The first are multi-head latent attention's (DeepSeek V3, Kimi K2, GLM-4.7-Flash, LongCat), the others DeepSeek V4's.
"""


def joined_name(name: str) -> str:
    """Return what is the same for all weights that an engine's loader joins: with them a weight travels in one bucket."""
    module, _, last = name.rpartition(".")
    parent, _, module_name = module.rpartition(".")
    joined = next((names for names in _JOINED if module_name in names), None)
    return name if joined is None else f"{parent}.{'+'.join(sorted(joined))}.{last}"


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


SentWeights = dict[str, tuple[str, torch.Tensor]]
"""By weight: the name under which it was sent with `RankBucket.changes`, and a copy on the CPU."""


class RankBucket(WeightBucket):
    """The bucket on one rank. Valid until the next one is requested."""

    def __init__(
        self, bucket_plan: BucketPlan, memory: SharedMemory, broadcaster: WeightBroadcaster, sent: SentWeights
    ) -> None:
        """Hold the weights in ``memory``, to be sent by ``broadcaster``; those of `changes` are kept in ``sent``."""
        self.specs = bucket_plan.specs
        self.last = bucket_plan.last
        self._size = bucket_plan.size
        self._memory = memory
        self._broadcaster = broadcaster
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
            self._broadcaster.broadcast([self._memory.flat[: self._size]])
        else:
            self._broadcaster.broadcast([tensor for _, tensor in self.on_device()])

    @override
    def ipc_handles(self) -> list[str]:
        return [self._memory.handle(self._size, self.specs)]


def rank_buckets(
    source: WeightSource,
    bucket_bytes: int,
    dtype: str | None,
    broadcaster: WeightBroadcaster,
    sent: SentWeights | None = None,
) -> Iterator[RankBucket]:
    """Iterate over buckets, all in the same memory. Collective: every rank takes every bucket."""
    specs = [
        spec
        if dtype is None or is_always_float32(spec.name) or spec.name in source.float32_weights
        else replace(spec, dtype=dtype)
        for spec in source.specs()
    ]
    bucket_plans = plan_buckets(specs, bucket_bytes)
    if not bucket_plans:
        return
    memory = SharedMemory.reserve(max(bucket_plan.size for bucket_plan in bucket_plans), source.gathers_on)
    for bucket_plan in bucket_plans:
        bucket = RankBucket(bucket_plan, memory, broadcaster, {} if sent is None else sent)
        source.gather(bucket.on_device())
        yield bucket


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
