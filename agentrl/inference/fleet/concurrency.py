"""Concurrency that follows the engines' KV cache: the limit of requests in progress for ``sampler.max_running=auto``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from agentrl.core.errors import ConfigError, EngineError
from agentrl.inference.client.control import EngineLoad
from agentrl.inference.client.sglang_client import SGLangClient

FIRST, MOST = 32, 65536
"""The first limit of an engine, and the largest."""
PERIOD_S = 1.0
"""Seconds between observations."""
FULL, ROOM = 0.95, 0.85
"""Used shares of the KV cache: from the first on the limit falls, below the second it may rise. Between them it stays."""
FALL, FIRST_RISE, RISE = 0.9, 1.25, 1.1
"""Factors of the limit; the first rises end with the first sign of pressure."""
PATIENCE, MOST_PATIENCE = 30, 960
"""Observations after a fall until the limit may rise again; doubled, up to the second, when that rise was too much."""


class ConcurrencyControl:
    """The limit of requests in progress of an engine.

    It rises while requests fill it and the cache has room. Under pressure (a full cache, or retracted requests) it falls
    below what the engine held, and stays there for a number of observations that doubles each time that the rise after it was too
    much. So it does not swing: under a constant load, falls become rarer and rarer.

    Args:
        most: the limit never rises above it.
    """

    def __init__(self, most: int = MOST) -> None:
        self.limit = min(FIRST, most)
        """Requests that the engine may have now."""
        self._most = most
        self._factor = FIRST_RISE
        self._patience = PATIENCE
        self._left = 0
        """Observations until the limit may rise."""
        self._has_risen = False
        """Whether it has since it fell."""
        self._retracted = 0
        """Retracted requests of the observation before: engines report the number for a while."""

    def observe(self, load: EngineLoad) -> int:
        """Take note of an observation, and return the limit."""
        retracted, self._retracted = load.retracted > self._retracted, load.retracted
        if load.running + load.waiting > self.limit:
            return self.limit  # requests from before the limit fell are still in progress
        queued = load.waiting > 0 and load.used_share >= ROOM  # others only wait for the next batch
        if retracted or queued or load.used_share >= FULL:
            self._fall(load)
        else:
            self._left = max(0, self._left - 1)
            if not self._left and load.used_share < ROOM and load.running >= self.limit:
                self.limit = min(self._most, max(self.limit + 1, int(self.limit * self._factor)))
                self._has_risen = True
        return self.limit

    def _fall(self, load: EngineLoad) -> None:
        if self._has_risen and self._factor == RISE:
            self._patience = min(MOST_PATIENCE, 2 * self._patience)
        self.limit = max(1, min(int(self.limit * FALL), load.running))
        self._factor, self._left, self._has_risen = RISE, self._patience, False


class ConcurrencyMonitor:
    """Observes engines and sets their limits, until it is closed.

    Args:
        engines: returns the clients of live engines by name.
        set_limit: sets the limit of an engine by its name.
    """

    def __init__(
        self, engines: Callable[[], Mapping[str, SGLangClient]], set_limit: Callable[[str, int], None]
    ) -> None:
        self._engines = engines
        self._set_limit = set_limit
        self._controls: dict[str, ConcurrencyControl] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Observe all engines once, and continue in a task.

        Raises:
            ConfigError: an engine reports no load.
        """
        try:
            await self.observe()
        except EngineError as error:
            raise ConfigError(f"sampler.max_running=auto: {error}; set a number") from error
        self._task = asyncio.create_task(self._run(), name="concurrency of engines")

    async def aclose(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def observe(self) -> None:
        """Observe the engines that sample, and set their limits.

        Raises:
            EngineError: one reports no load.
        """
        ready = {name: client for name, client in self._engines().items() if client.ready}
        loads = await asyncio.gather(*(client.control.load() for client in ready.values()))
        for name, load in zip(ready, loads, strict=True):
            if load is not None:
                self._set_limit(name, self._controls.setdefault(name, ConcurrencyControl()).observe(load))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            with contextlib.suppress(EngineError):  # the health monitor judges engines
                await self.observe()

    def metrics(self) -> dict[str, float]:
        """Return the mean limit of an engine."""
        limits = [control.limit for control in self._controls.values()]
        return {"rollout/max_running": sum(limits) / len(limits)} if limits else {}
