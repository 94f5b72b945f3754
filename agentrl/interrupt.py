"""Ctrl-C and SIGTERM as an orderly end: the run saves, then stops. A second Ctrl-C ends it at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

from agentrl.errors import RunStopped

T = TypeVar("T")


class Interrupt:
    """While entered, SIGINT and SIGTERM set `requested` in place of raising."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()

    def __enter__(self) -> Interrupt:
        """Take over the signals."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give the signals back."""
        self._release()

    def _request(self) -> None:
        self.requested.set()
        self._release()

    def _release(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what ``work`` returns, or cancel it once a signal comes.

        Raises:
            RunStopped: a signal came first.

        """
        if self.requested.is_set():
            work.close()
            raise RunStopped("interrupted")
        task = asyncio.ensure_future(work)
        waiter = asyncio.ensure_future(self.requested.wait())
        try:
            await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise RunStopped("interrupted")
        finally:
            waiter.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
