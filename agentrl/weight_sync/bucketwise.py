"""The base class of transports that send one bucket at a time."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence

from typing_extensions import override

from agentrl.inference.base import EngineControl
from agentrl.learner.base import LearnerGroup, WeightBucket
from agentrl.weight_sync.base import SyncedWeights, WeightSync
from agentrl.weight_sync.engines import UpdateCheck, begin_updates, cancel_updates


class BucketwiseSync(WeightSync, ABC):
    """Sends one bucket at a time to all engines.

    Args:
        bucket_bytes: size of a bucket; a larger tensor gets a separate bucket.
        dtype: weights are cast to it before they are sent; None keeps the learner's dtype.
        check: how engines are checked afterwards; see `UpdateCheck`.

    """

    def __init__(self, *, bucket_bytes: int, dtype: str | None = None, check: str = "version") -> None:
        self.bucket_bytes = bucket_bytes
        self.dtype = dtype
        self.check = check

    @override
    async def sync_weights(
        self, learner: LearnerGroup, engines: Sequence[EngineControl], version: int
    ) -> SyncedWeights:
        """Sync the weights bucket by bucket. The learner is called in threads, as its calls block.

        Raises:
            EngineError: an engine refused a bucket, died or did not answer in time, or the check afterwards fails.

        """
        check = await UpdateCheck.start(self.check, engines)
        try:
            await begin_updates(engines, version)
            buckets = learner.buckets(self.bucket_bytes, self.dtype)
            number = 0
            # A bucket is valid until the next one is requested.
            while (bucket := await asyncio.to_thread(next, buckets, None)) is not None:
                number += 1
                await check.add(bucket)
                await self._transfer(learner, engines, bucket, version, number)
        except BaseException:
            await self.aclose()
            await cancel_updates(engines)
            raise
        return await check.verify(engines, version)

    @override
    async def aclose(self) -> None:
        """Not every transport keeps resources."""

    @abstractmethod
    async def _transfer(
        self, learner: LearnerGroup, engines: Sequence[EngineControl], bucket: WeightBucket, version: int, number: int
    ) -> None:
        """Transfer a bucket, with ``number`` from 1, to all engines; returns when all of them have it."""
