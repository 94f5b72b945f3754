"""What the transports share that bring weights into the engines bucket by bucket."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence

from agentrl.inference.base import EngineControl
from agentrl.learner.base import LearnerGroup, WeightBucket
from agentrl.weight_sync.engines import Check, begin_all, give_up


class BucketwiseSync(ABC):
    """Sends one bucket at a time to all engines.

    Args:
        bucket_bytes: size of a bucket; a larger tensor makes one of its own.
        dtype: what weights are cast to before they are sent; None leaves them as the learner holds them.
        check: what engines are asked afterwards; see `Check`.

    """

    def __init__(self, *, bucket_bytes: int, dtype: str | None = None, check: str = "version") -> None:
        self.bucket_bytes = bucket_bytes
        self.dtype = dtype
        self.check = check

    async def push(self, learner: LearnerGroup, engines: Sequence[EngineControl], version: int) -> None:
        """Send the weights; see `WeightSync.push`. The learner is called in threads, as its calls block.

        Raises:
            EngineError: an engine refused a bucket, died or did not answer in time, or the check afterwards fails.

        """
        check = await Check.begin(self.check, engines)
        try:
            await begin_all(engines, version)
            buckets = learner.buckets(self.bucket_bytes, self.dtype)
            number = 0
            # A bucket is held until the next one is asked for.
            while (bucket := await asyncio.to_thread(next, buckets, None)) is not None:
                number += 1
                await check.note(bucket)
                await self._send(learner, engines, bucket, version, number)
        except BaseException:
            await self.aclose()
            await give_up(engines)
            raise
        await check.of(engines, version)

    async def aclose(self) -> None:  # noqa: B027 - not every transport keeps anything
        """Give back what is kept between updates."""

    @abstractmethod
    async def _send(
        self, learner: LearnerGroup, engines: Sequence[EngineControl], bucket: WeightBucket, version: int, number: int
    ) -> None:
        """Bring a bucket, ``number`` from 1 on, into all engines; afterwards nobody needs it any more."""
