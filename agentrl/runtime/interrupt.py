"""Graceful shutdown by a signal: the run saves, then ends.

Ctrl-C sends SIGINT; batch systems and containers send SIGTERM, some to every process and more than once; a terminal that
is closed sends SIGHUP. A second Ctrl-C ends the run at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

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


class _CallerInterrupts:
    """The interrupts of code that runs in a thread, which another thread requests: signals arrive in the main thread alone."""

    def __init__(self) -> None:
        self._requests: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def add(self, request: Callable[[], object]) -> None:
        """Add a function that requests an interrupt, to be called in any thread."""
        with self._lock:
            self._requests.append(request)

    def remove(self, request: Callable[[], object]) -> None:
        """Remove it."""
        with self._lock:
            self._requests.remove(request)

    def request(self) -> bool:
        """Request the innermost interrupt; return whether there is one."""
        with self._lock:
            if not self._requests:
                return False
            self._requests[-1]()
            return True


_by_caller: ContextVar[_CallerInterrupts | None] = ContextVar("interrupts_by_caller", default=None)


@contextmanager
def interrupts_by_caller() -> Iterator[Callable[[], bool]]:
    """Let the interrupts of threads that are started in this context be requested by the function that is yielded.

    It returns whether there was one to request, and may be called in any thread.
    """
    interrupts = _CallerInterrupts()
    token = _by_caller.set(interrupts)
    try:
        yield interrupts.request
    finally:
        _by_caller.reset(token)


class Interrupt:
    """While entered, `handled_signals` set `requested` in place of raising; see also `interrupts_by_caller`.

    Signal handlers are installed in the main thread only, and are as before at the end.

    Args:
        notify: prints the line that acknowledges the first signal, at once.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.requested = asyncio.Event()
        self._notify = notify
        self._by = ""
        self._handlers: dict[signal.Signals, Any] = {}
        """Handlers of the handled signals, before."""
        self._caller: _CallerInterrupts | None = None
        self._request_by_caller: Callable[[], object] = lambda: None
        self._terminals: list[int] = []

    def __enter__(self) -> Interrupt:
        """Install the signal handlers."""
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            self._terminals = terminals()
            self._handlers = {number: signal.getsignal(number) for number in handled_signals()}
            for number in self._handlers:
                loop.add_signal_handler(number, self._request, number)
        elif (caller := _by_caller.get()) is not None:
            self._caller = caller
            self._request_by_caller = partial(loop.call_soon_threadsafe, self._request, signal.SIGINT)
            caller.add(self._request_by_caller)
        return self

    def __exit__(self, *exception: object) -> None:
        """Remove the signal handlers."""
        loop = asyncio.get_running_loop()
        for number, handler in self._handlers.items():
            loop.remove_signal_handler(number)
            if handler is not None:  # one that was not installed from Python
                signal.signal(number, handler)
        if self._caller is not None:
            self._caller.remove(self._request_by_caller)

    def check(self) -> None:
        """Raise `RunStopped` if a signal has arrived."""
        if self.requested.is_set():
            raise RunStopped(f"interrupted by {self._by}")

    def _request(self, number: signal.Signals) -> None:
        if number == signal.SIGINT and self._caller is None:
            asyncio.get_running_loop().remove_signal_handler(number)
        if number == signal.SIGHUP:
            leave_terminals(self._terminals)
        if not self.requested.is_set():
            self._by = number.name
            self.requested.set()
            with suppress(OSError):  # Ctrl-C has ended tee, too, to which the output is piped
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
            # As in asyncio.timeout: a cancellation from elsewhere continues.
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
