"""Graceful shutdown by a signal: the run saves, then ends.

Ctrl-C sends SIGINT; batch systems and containers send SIGTERM, some to every process and more than once; a terminal that
is closed sends SIGHUP. A second Ctrl-C ends the run at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from agentrl.core.errors import AgentrlError, RunStopped

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that end a run."""
WATCH_S = 0.5
"""Seconds between calls of ``watch``."""


def handled_signals() -> list[signal.Signals]:
    """Return `SIGNALS`, without a SIGHUP that ``nohup`` has this process ignore."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in SIGNALS if not (ignored and number == signal.SIGHUP)]


def terminals() -> list[int]:
    """Return which of the standard file descriptors are terminals."""
    return [number for number in range(3) if os.isatty(number)]


def leave_terminals(numbers: Iterable[int]) -> None:
    """Discard what is printed from here on to terminals that are gone: writing to them raises, also while a run saves."""
    for number in numbers:
        if not os.isatty(number):
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, number)
            os.close(nowhere)


class Interrupt:
    """While entered, `handled_signals` set `requested` in place of raising.

    Args:
        notify: prints the line that acknowledges the first signal, at once.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.requested = asyncio.Event()
        self._notify = notify
        self._by = ""
        self._handled: list[signal.Signals] = []
        self._terminals: list[int] = []

    def __enter__(self) -> Interrupt:
        """Install the signal handlers."""
        loop = asyncio.get_running_loop()
        self._terminals = terminals()
        self._handled = handled_signals()
        for number in self._handled:
            loop.add_signal_handler(number, self._request, number)
        return self

    def __exit__(self, *exception: object) -> None:
        """Remove the signal handlers."""
        loop = asyncio.get_running_loop()
        for number in self._handled:
            loop.remove_signal_handler(number)

    def check(self) -> None:
        """Raise `RunStopped` if a signal has arrived."""
        if self.requested.is_set():
            raise RunStopped(f"interrupted by {self._by}")

    def _request(self, number: signal.Signals) -> None:
        if number == signal.SIGINT:
            asyncio.get_running_loop().remove_signal_handler(number)
        if number == signal.SIGHUP:
            leave_terminals(self._terminals)
        if not self.requested.is_set():
            self._by = number.name
            self.requested.set()
            self._notify(f"{number.name}: stopping. Ctrl-C again stops at once, without saving.")

    @asynccontextmanager
    async def guard(self, watch: Callable[[], None] | None = None) -> AsyncIterator[None]:
        """Cancel the body when a signal arrives or ``watch``, called every `WATCH_S` seconds, raises.

        Raises:
            RunStopped: a signal arrived first; otherwise what ``watch`` raised.
        """
        self.check()
        body = asyncio.current_task()
        assert body is not None, "guard is entered in a task"
        reason: Exception | None = None

        async def observe() -> None:
            nonlocal reason
            try:
                while not await self._requested_within(WATCH_S):
                    if watch is not None:
                        watch()
                self.check()
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

    @asynccontextmanager
    async def guard_episodes(self, check_services: Callable[[], None]) -> AsyncIterator[None]:
        """Run episodes in the body. A signal ends them, and a server that dies ends them with the server's own error.

        Args:
            check_services: raises if a service has died; see `agentrl.runtime.services.Services.check`.
        """
        try:
            async with self.guard(check_services):
                yield
        except AgentrlError:
            self.check()  # a signal to all processes has ended the servers, too
            check_services()
            raise

    async def _requested_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self.requested.wait()
        except TimeoutError:
            return False
