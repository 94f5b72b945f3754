"""Weight export of one process: buckets of full weights, and the broadcast group through which they are sent."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from typing_extensions import override

from agentrl.distributed.base import WeightGroup
from agentrl.learner.base import WeightBucket, WeightExport, WeightSource
from agentrl.learner.export.broadcaster import WeightBroadcaster
from agentrl.learner.export.bucket import SentWeights, rank_buckets

if TYPE_CHECKING:
    import torch


class WeightExporter(WeightExport):
    """Weight export of one process. Methods are collective.

    Used by every rank of a Ray learner, and a base class of in-process learners and of test and benchmark learners.
    """

    def __init__(self, source: WeightSource, adapters: Mapping[str, WeightSource] = MappingProxyType({})) -> None:
        """Export the weights of ``source``, and LoRA adapters by policy."""
        self._source = source
        self._adapters = adapters
        self._broadcaster = WeightBroadcaster()
        self._sent: SentWeights = {}

    @override
    def buckets(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[WeightBucket]:
        return rank_buckets(self._source, bucket_bytes, dtype, self._broadcaster, self._sent)

    @override
    def adapters(self, dtype: str | None = None, policy: str = "main") -> list[tuple[str, torch.Tensor]]:
        if policy not in self._adapters:
            return []
        buckets = rank_buckets(self._adapters[policy], sys.maxsize, dtype, self._broadcaster)
        return [(name, tensor.clone()) for bucket in buckets for name, tensor in bucket.tensors()]

    @override
    def open_group(self, urls: Sequence[str], size: int, backend: str, timeout_s: float) -> WeightGroup:
        return self._broadcaster.open(urls, size, backend, timeout_s)

    @override
    def join_group(self, group: WeightGroup) -> None:
        self._broadcaster.join(group)

    @override
    def leave_group(self) -> None:
        self._broadcaster.leave()
