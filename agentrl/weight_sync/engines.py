"""What all transports do with engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Sequence

from agentrl.core.errors import EngineError
from agentrl.inference.base import EngineControl
from agentrl.learner.base import WeightBucket
from agentrl.obs.waiting import waiting
from agentrl.weight_sync.checksum import Checksums


async def on_all(
    engines: Sequence[EngineControl], phase: str, call: Callable[[EngineControl], Awaitable[None]]
) -> None:
    """Make one call to every engine at the same time, and wait for all of them even when one fails.

    Raises:
        EngineError: names the engine by number, and the phase.

    """

    async def watched(number: int, engine: EngineControl) -> None:
        with waiting("engine", f"{number} of {len(engines)}", phase):
            await call(engine)

    results = await asyncio.gather(*(watched(*one) for one in enumerate(engines)), return_exceptions=True)
    for number, result in enumerate(results):
        if isinstance(result, EngineError):
            raise EngineError(f"engine {number} of {len(engines)}, {phase}: {result}") from result
        if isinstance(result, BaseException):
            raise result


class Check:
    """What ``weights.check`` asks of the engines after an update; made anew for each."""

    def __init__(self, mode: str, kinds: Collection[str] = ()) -> None:
        """``mode`` is ``none``, ``version`` or ``checksum``, and then ``kinds`` are how engines make these."""
        self._mode = mode
        self._sums = Checksums(kinds)

    @classmethod
    async def begin(cls, mode: str, engines: Sequence[EngineControl]) -> Check:
        """Return what checks the next update of these engines.

        Raises:
            EngineError: one does not answer.
        """
        if mode != "checksum":
            return cls(mode)
        return cls(mode, set(await asyncio.gather(*(engine.checksum_kind() for engine in engines))))

    async def note(self, bucket: WeightBucket) -> None:
        """Remember a bucket that is sent."""
        if self._mode == "checksum":
            await asyncio.to_thread(lambda: self._sums.add(bucket.tensors()))

    async def of(self, engines: Sequence[EngineControl], version: int) -> None:
        """Ask all engines.

        Raises:
            EngineError: one samples with another version, holds other weights, or cannot say.
        """
        if self._mode != "none":
            await check_version(engines, version)
        if self._mode == "checksum":
            await self._checksums(engines)

    async def _checksums(self, engines: Sequence[EngineControl]) -> None:
        async def compare(engine: EngineControl) -> None:
            difference = self._sums.difference(await engine.checksums())
            if difference is not None:
                raise EngineError(f"its weights are not those that were sent: {difference}")

        await on_all(engines, "check of the weights", compare)


async def check_version(engines: Sequence[EngineControl], version: int) -> None:
    """Check that every engine samples with ``version``.

    Raises:
        EngineError: one cannot say, or says another.

    """

    async def check(engine: EngineControl) -> None:
        found = await engine.version()
        if found != version:
            raise EngineError(f"it samples with version {found}, but {version} was sent")

    await on_all(engines, "check of the policy version", check)


async def begin_all(engines: Sequence[EngineControl], version: int) -> None:
    """Let no engine start a generation until it has all weights.

    Raises:
        EngineError: one does not stand still.

    """
    await on_all(engines, f"begin of the update to version {version}", lambda engine: engine.begin_update())


async def give_up(engines: Sequence[EngineControl], *, limit_s: float = 5.0) -> None:
    """Tell engines that no further bucket comes; those that do not answer are left alone, as the push has failed."""

    async def cancel(engine: EngineControl) -> None:
        with contextlib.suppress(EngineError, TimeoutError):
            await asyncio.wait_for(engine.cancel_update(), limit_s)

    await asyncio.gather(*(cancel(engine) for engine in engines))
