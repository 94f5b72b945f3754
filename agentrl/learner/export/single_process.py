"""The way out for the weights of a learner that is one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from agentrl.distributed.base import TensorSpec, WeightGroup
from agentrl.learner.base import HeldBucket, WeightSource
from agentrl.learner.export.broadcaster import SendingPlace
from agentrl.learner.export.bucket import RankBucket, held_buckets


class Outgoing:
    """The part of `agentrl.learner.base.LearnerGroup` that gives weights away. A base for learners and for what stands in."""

    def __init__(self, source: WeightSource) -> None:
        """Give the weights of ``source``."""
        self._source = source
        self._place = SendingPlace()

    def buckets(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[HeldBucket]:
        """Iterate over the weights; see `LearnerGroup.buckets`."""
        for bucket in held_buckets(self._source, bucket_bytes, dtype):
            yield LocalBucket(bucket, self._place)

    def open_group(self, urls: Sequence[str], size: int, backend: str, timeout_s: float) -> WeightGroup:
        """Open a group's meeting point; see `LearnerGroup.open_group`."""
        return self._place.open(urls, size, backend, timeout_s)

    def join_group(self, group: WeightGroup) -> None:
        """Join the group; see `LearnerGroup.join_group`."""
        self._place.join(group)

    def leave_group(self) -> None:
        """Leave the group; see `LearnerGroup.leave_group`."""
        self._place.leave()


class LocalBucket:
    """Implements `agentrl.learner.base.HeldBucket` over the bucket of the only rank."""

    def __init__(self, bucket: RankBucket, place: SendingPlace) -> None:
        """Hold ``bucket``, to be sent from ``place``."""
        self._bucket = bucket
        self._place = place

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """See `HeldBucket.specs`."""
        return self._bucket.specs

    @property
    def last(self) -> bool:
        """See `HeldBucket.last`."""
        return self._bucket.last

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the weights on the CPU; see `HeldBucket.tensors`."""
        return self._bucket.tensors()

    def save(self, file: Path) -> None:
        """Write them; see `HeldBucket.save`."""
        self._bucket.save(file)

    def broadcast(self) -> None:
        """Send them; see `HeldBucket.broadcast`."""
        self._place.broadcast([tensor for _, tensor in self._bucket.held()])

    def share(self) -> list[str]:
        """Return what opens them; see `HeldBucket.share`."""
        return [self._bucket.share()]
