"""Calls of all engines that every transport makes: begin and cancel updates, check the result."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager

from agentrl.core.errors import EngineError
from agentrl.distributed.flat_bucket import total_bytes
from agentrl.inference.base import EngineControl
from agentrl.learner.base import WeightBucket
from agentrl.obs.waiting import waiting
from agentrl.weight_sync.base import SyncedWeights
from agentrl.weight_sync.checksum import Checksums


async def call_all(
    engines: Sequence[EngineControl], phase: str, call: Callable[[EngineControl], Awaitable[None]]
) -> None:
    """Call all engines concurrently, and wait for all of them even if one fails.

    Raises:
        EngineError: with the number of the engine, and the phase.
    """

    async def call_one(number: int, engine: EngineControl) -> None:
        with waiting("engine", f"{number} of {len(engines)}", phase):
            await call(engine)

    results = await asyncio.gather(*(call_one(*numbered) for numbered in enumerate(engines)), return_exceptions=True)
    for number, result in enumerate(results):
        if isinstance(result, EngineError):
            raise EngineError(f"engine {number} of {len(engines)}, {phase}: {result}") from result
        if isinstance(result, BaseException):
            raise result


class UpdateCheck:
    """The check of the engines after one update, according to ``weights.check``."""

    def __init__(self, mode: str, kinds: Collection[str] = ()) -> None:
        """``mode`` is ``none``, ``version`` or ``checksum``; ``kinds`` are the engines' kinds of checksums."""
        self._mode = mode
        self._sums = Checksums(kinds)
        self._fingerprint = self._bytes = 0

    @classmethod
    async def start(cls, mode: str, engines: Sequence[EngineControl]) -> UpdateCheck:
        """Return the check of the next update of these engines.

        Raises:
            EngineError: an engine does not answer.
        """
        if mode != "checksum":
            return cls(mode)
        return cls(mode, set(await asyncio.gather(*(engine.checksum_kind() for engine in engines))))

    async def add(self, bucket: WeightBucket) -> None:
        """Add a bucket that is sent."""
        self._fingerprint ^= await asyncio.to_thread(bucket.fingerprint)
        self._bytes += total_bytes(*bucket.specs)
        if self._mode == "checksum":
            await asyncio.to_thread(lambda: self._sums.add(bucket.tensors()))

    async def verify(self, engines: Sequence[EngineControl], version: int) -> SyncedWeights:
        """Check all engines, and return what was sent.

        Raises:
            EngineError: an engine samples with another version, holds other weights, or cannot report them.
        """
        if self._mode != "none":
            await check_version(engines, version)
        if self._mode == "checksum":
            await self._checksums(engines)
        return SyncedWeights(self._fingerprint, self._bytes)

    async def _checksums(self, engines: Sequence[EngineControl]) -> None:
        async def compare(engine: EngineControl) -> None:
            difference = self._sums.difference(await engine.checksums())
            if difference is not None:
                raise EngineError(f"its weights are not those that were sent: {difference}")

        await call_all(engines, "check of the weights", compare)


async def check_version(engines: Sequence[EngineControl], version: int) -> None:
    """Check that every engine samples with ``version``.

    Raises:
        EngineError: an engine reports another version, or none.
    """

    async def check(engine: EngineControl) -> None:
        sampled_version = await engine.version()
        if sampled_version != version:
            raise EngineError(f"it samples with version {sampled_version}, but {version} was sent")

    await call_all(engines, "check of the policy version", check)


@asynccontextmanager
async def paused(engines: Sequence[EngineControl], mode: str) -> AsyncIterator[None]:
    """Pause the generations in progress on all engines in the block; see `EngineControl.pause`.

    Raises:
        EngineError: an engine does not pause or does not go on. All others go on.
    """
    try:
        await call_all(engines, "pause of generations", lambda engine: engine.pause(mode))
        yield
    finally:
        await call_all(engines, "end of the pause", lambda engine: engine.resume())


async def begin_updates(engines: Sequence[EngineControl], version: int) -> None:
    """Begin an update on all engines: no generation starts until all weights have arrived.

    Raises:
        EngineError: an engine does not stop sampling.
    """
    await call_all(engines, f"begin of the update to version {version}", lambda engine: engine.updates.begin())


async def cancel_updates(engines: Sequence[EngineControl], *, limit_s: float = 5.0) -> None:
    """Cancel the update on all engines. Errors are ignored, as the sync has already failed."""

    async def cancel(engine: EngineControl) -> None:
        with contextlib.suppress(EngineError, TimeoutError):
            await asyncio.wait_for(engine.updates.cancel(), limit_s)

    await asyncio.gather(*(cancel(engine) for engine in engines))
