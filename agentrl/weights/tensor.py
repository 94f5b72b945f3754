"""Weights sent in the request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from agentrl.protocols import EngineControl, LearnerGroup
from agentrl.weights.engines import check_version, on_all

Bucket = list[tuple[str, torch.Tensor]]


class TensorSync:
    """Sends one bucket at a time to all engines.

    Args:
        bucket_bytes: size of a bucket; a larger tensor makes one of its own.
        folder: not needed here.

    """

    def __init__(self, *, bucket_bytes: int, folder: Path | None = None) -> None:
        self.bucket_bytes = bucket_bytes

    async def push(self, learner: LearnerGroup, engines: Sequence[EngineControl], version: int) -> None:
        """Send the weights; see `WeightSync.push`. Buckets are taken in a thread, as the learner's calls block.

        Raises:
            EngineError: an engine refused a bucket, or samples with another version afterwards.

        """
        buckets = learner.weights(self.bucket_bytes)
        # The last bucket must be known as such, so one is taken ahead; taking it ends the validity of the one before.
        bucket = await asyncio.to_thread(_next, buckets)
        number = 1
        while bucket is not None:
            kept = [(name, tensor.clone()) for name, tensor in bucket]
            following = await asyncio.to_thread(_next, buckets)
            await self._send(kept, engines, version, number, last=following is None)
            bucket, number = following, number + 1
        await check_version(engines, version)

    async def _send(
        self, bucket: Bucket, engines: Sequence[EngineControl], version: int, number: int, *, last: bool
    ) -> None:
        async def send(engine: EngineControl) -> None:
            await engine.update_from_tensors(bucket, version, last=last)

        await on_all(engines, f"weights of version {version}, bucket {number}", send)


def _next(buckets: Iterator[Bucket]) -> Bucket | None:
    return next(buckets, None)
