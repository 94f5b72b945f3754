"""Threads for the blocking calls of thousands of concurrent episodes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from queue import SimpleQueue
from typing import Any

PATIENCE_S = 0.02
"""A call that has waited this long for a thread starts further ones."""
BATCH = 16
"""Most results that an iteration of the event loop receives: what continues with them must not hold up the others for long."""


class EpisodeThreads(Executor):
    """An executor for ``run_in_executor``, with at most ``most`` threads.

    A `ThreadPoolExecutor` needs more CPU time for a call, and in a burst of calls it starts a thread for each. Here one thread
    takes all calls until one of them blocks. Then the number doubles. Threads end with this object.
    """

    def __init__(self, most: int) -> None:
        """Allow ``most`` threads; none is started yet."""
        self.count = 0
        """Threads."""
        self._most = most
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._submitted = 0
        self._results: _Results | None = None
        self._check_planned = False
        weakref.finalize(self, self._calls.put, None)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Call a function in a thread and return a future of the running event loop; ``run_in_executor`` returns it too."""
        loop = asyncio.get_running_loop()
        if self._results is None or self._results.loop is not loop:
            self._results, self._check_planned = _Results(loop), False
        call = _Call(self._results, lambda: fn(*args, **kwargs))
        self._calls.put(call)
        self._submitted += 1
        if not self.count:
            self._start(1)
        if not self._check_planned:
            self._plan_check(loop)
        return call.future

    def _plan_check(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.count < self._most:
            self._check_planned = True
            loop.call_later(PATIENCE_S, self._grow, loop, self._submitted)

    def _grow(self, loop: asyncio.AbstractEventLoop, submitted: int) -> None:
        """Start threads if one of the first ``submitted`` calls has not begun."""
        self._check_planned = False
        waiting = self._calls.qsize()
        if self._submitted - waiting < submitted:
            self._start(min(self.count, waiting, self._most - self.count))
        if waiting:
            self._plan_check(loop)

    def _start(self, count: int) -> None:
        for _ in range(count):
            self.count += 1
            threading.Thread(target=_run_calls, args=(self._calls,), name=f"env_{self.count}", daemon=True).start()


class _Results:
    """The results of calls on their way to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._ended: deque[tuple[_Call, Any, BaseException | None]] = deque()
        self._scheduled = False

    def add(self, call: _Call, result: Any, error: BaseException | None) -> None:
        """Send a result, from any thread."""
        self._ended.append((call, result, error))
        if not self._scheduled:
            self._scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop was closed: no task waits
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        for _ in range(BATCH):
            if not self._ended:
                self._scheduled = False
                if not self._ended:  # otherwise a thread has added one before it could see that
                    return
            call, result, error = self._ended.popleft()
            if call.future.done():
                continue  # cancelled
            if error is None:
                call.future.set_result(result)
            else:
                call.future.set_exception(error)
        self.loop.call_soon(self._deliver)


class _Call:
    """A function to be called in a thread."""

    __slots__ = ("_function", "_results", "future")

    def __init__(self, results: _Results, function: Callable[[], Any]) -> None:
        self.future: asyncio.Future[Any] = results.loop.create_future()
        self._results = results
        self._function = function

    def run(self) -> None:
        """Call it, unless its caller was cancelled."""
        if self.future.cancelled():
            return
        result: Any = None
        raised: BaseException | None = None
        try:
            result = self._function()
        except StopIteration as error:  # a future cannot hold one
            raised = RuntimeError(f"StopIteration: {error}").with_traceback(error.__traceback__)
        except BaseException as error:
            raised = error
        self._results.add(self, result, raised)


def _run_calls(calls: SimpleQueue[_Call | None]) -> None:
    """Run calls in this thread until a None, which is left to the other threads."""
    while (call := calls.get()) is not None:
        call.run()
        del call  # nothing of it is kept while the thread waits
    calls.put(None)
