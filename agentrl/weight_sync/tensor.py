"""Weight sync by value: weights in the body of HTTP requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agentrl.inference.base import EngineControl
from agentrl.learner.base import LearnerGroup, WeightBucket
from agentrl.weight_sync.bucketwise import BucketwiseSync
from agentrl.weight_sync.engines import call_all


class TensorSync(BucketwiseSync):
    """Transfers weights by value, which works between any two processes."""

    async def _transfer(
        self, learner: LearnerGroup, engines: Sequence[EngineControl], bucket: WeightBucket, version: int, number: int
    ) -> None:
        named = await asyncio.to_thread(bucket.tensors)

        async def send(engine: EngineControl) -> None:
            await engine.updates.from_tensors(named, version, last=bucket.last, ranks=await engine.groups.ranks())

        await call_all(engines, f"weights of version {version}, bucket {number}", send)
