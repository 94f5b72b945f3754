"""Weights sent in the request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from agentrl.protocols import EngineControl, LearnerGroup
from agentrl.weights.checksum import Bucket
from agentrl.weights.engines import Check, give_up, on_all


class TensorSync:
    """Sends one bucket at a time to all engines.

    Args:
        bucket_bytes: size of a bucket; a larger tensor makes one of its own.
        folder: not needed here.
        check: what engines are asked afterwards; see `Check`.

    """

    def __init__(self, *, bucket_bytes: int, folder: Path | None = None, check: str = "version") -> None:
        self.bucket_bytes = bucket_bytes
        self.check = check

    async def aclose(self) -> None:
        """Nothing is kept between updates."""

    async def push(self, learner: LearnerGroup, engines: Sequence[EngineControl], version: int) -> None:
        """Send the weights; see `WeightSync.push`. Buckets are taken in a thread, as the learner's calls block.

        Raises:
            EngineError: an engine refused a bucket, or the check afterwards fails.

        """
        check = Check(self.check)
        try:
            await each_bucket(check.watch(learner.weights(self.bucket_bytes)), partial(self._send, engines, version))
        except BaseException:
            await give_up(engines)
            raise
        await check.of(engines, version)

    async def _send(
        self, engines: Sequence[EngineControl], version: int, bucket: Bucket, number: int, last: bool
    ) -> None:
        async def send(engine: EngineControl) -> None:
            await engine.update_from_tensors(bucket, version, last=last)

        await on_all(engines, f"weights of version {version}, bucket {number}", send)


async def each_bucket(buckets: Iterator[Bucket], send: Callable[[Bucket, int, bool], Awaitable[None]]) -> None:
    """Call ``send`` with each bucket, its number (from 1) and whether it is the last.

    Buckets are taken in a thread. The last one must be known as such, so one is taken ahead; as that ends the validity
    of the one before, what is sent is a copy.
    """
    bucket = await asyncio.to_thread(next, buckets, None)
    number = 1
    while bucket is not None:
        kept = [(name, tensor.clone()) for name, tensor in bucket]
        following = await asyncio.to_thread(next, buckets, None)
        await send(kept, number, following is None)
        bucket, number = following, number + 1
