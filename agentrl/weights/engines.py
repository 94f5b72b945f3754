"""What all transports do with engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from agentrl.errors import EngineError
from agentrl.obs.waiting import waiting
from agentrl.protocols import EngineControl


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
