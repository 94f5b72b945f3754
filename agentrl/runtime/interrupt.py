"""Graceful shutdown on Ctrl-C and SIGTERM: the run saves, then stops. A second Ctrl-C ends it at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from agentrl.core.errors import RunStopped

T = TypeVar("T")

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

    async def guard(self, work: Coroutine[Any, Any, T], watch: Callable[[], None] | None = None) -> T:
        """Return what ``work`` returns, or cancel it when a signal arrives or ``watch``, called every `WATCH_S`, raises.

        Raises:
            RunStopped: a signal arrived first.

        """
        if self.requested.is_set():
            work.close()
            raise RunStopped("interrupted")
        task = asyncio.ensure_future(work)
        waiter = asyncio.ensure_future(self.requested.wait())
        try:
            while not task.done():
                if waiter.done():
                    raise RunStopped("interrupted")
                await asyncio.wait({task, waiter}, timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED)
                if watch is not None and not task.done():
                    watch()
            return task.result()
        finally:
            waiter.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
