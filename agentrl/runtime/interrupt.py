"""Graceful shutdown on Ctrl-C and SIGTERM: the run saves, then stops. A second Ctrl-C ends it at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType

from agentrl.core.errors import RunStopped

WATCH_S = 0.5
"""Seconds between calls of ``watch``."""


class Interrupt:
    """While entered, SIGINT and SIGTERM set `requested` in place of raising."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()

    def __enter__(self) -> Interrupt:
        """Install the signal handlers."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove the signal handlers."""
        self._release()

    def _request(self) -> None:
        self.requested.set()
        self._release()

    def _release(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    @asynccontextmanager
    async def guard(self, watch: Callable[[], None] | None = None) -> AsyncIterator[None]:
        """Cancel the body when a signal arrives or ``watch``, called every `WATCH_S` seconds, raises.

        Raises:
            RunStopped: a signal arrived first; otherwise what ``watch`` raised.

        """
        if self.requested.is_set():
            raise RunStopped("interrupted")
        body = asyncio.current_task()
        assert body is not None, "guard is entered in a task"
        reason: Exception | None = None

        async def observe() -> None:
            nonlocal reason
            try:
                while not await self._requested_within(WATCH_S):
                    if watch is not None:
                        watch()
                raise RunStopped("interrupted")
            except Exception as error:
                reason = error
                body.cancel()

        cancellations = body.cancelling()
        observer = asyncio.create_task(observe())
        try:
            yield
        except asyncio.CancelledError:
            # As in asyncio.timeout: a cancellation from elsewhere goes on.
            if reason is None or body.uncancel() > cancellations:
                raise
            raise reason from None
        finally:
            observer.cancel()

    async def _requested_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self.requested.wait()
        except TimeoutError:
            return False
