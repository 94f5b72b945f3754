"""The base class of transports that send one bucket at a time."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence

from typing_extensions import override

from agentrl.inference.base import EngineControl
from agentrl.learner.base import LearnerGroup, WeightBucket
from agentrl.weight_sync.base import SyncedWeights, Transport
from agentrl.weight_sync.engines import UpdateCheck, begin_updates, cancel_updates


class BucketwiseSync(Transport):
    """Sends one bucket at a time to all engines."""

    @override
    async def sync_weights(
        self, learner: LearnerGroup, engines: Sequence[EngineControl], version: int
    ) -> SyncedWeights:
        """Sync the weights bucket by bucket. The learner is called in threads, as its calls block.

        Raises:
            EngineError: an engine refused a bucket, died or did not answer in time, or the check afterwards fails.
        """
        check = await UpdateCheck.start(self.options.check, engines)
        try:
            await begin_updates(engines, version)
            buckets = learner.buckets(self.options.bucket_bytes, self.options.dtype)
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

    @abstractmethod
    async def _transfer(
        self, learner: LearnerGroup, engines: Sequence[EngineControl], bucket: WeightBucket, version: int, number: int
    ) -> None:
        """Transfer a bucket, with ``number`` from 1, to all engines; returns when all of them have it."""
