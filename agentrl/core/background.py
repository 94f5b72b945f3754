"""Work in the background: in a thread that does not keep the process alive, and in tasks of which the first decides."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any, TypeVar

from typing_extensions import override

from agentrl.core.child_process import StartedChildren, started_children

T = TypeVar("T")

_loops: list[asyncio.AbstractEventLoop] = []
"""The event loop of `run_coroutine`, once it is needed."""
_lock = threading.Lock()
os.register_at_fork(after_in_child=_loops.clear)


def run_coroutine(work: Coroutine[object, object, T]) -> T:
    """Return the result of a coroutine, run in the event loop of a daemon thread that is the same for all calls of the process.

    What a coroutine leaves open there, such as a connection, can be used by the next one.
    """
    with _lock:
        if not _loops:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="agentrl-coroutines", daemon=True).start()
            _loops.append(loop)
    return asyncio.run_coroutine_threadsafe(work, _loops[0]).result()


def run_in_daemon_thread(function: Callable[[], T], name: str) -> Future[T]:
    """Call a function in a new daemon thread ``name``, in this context; the future has its result or its error."""
    future: Future[T] = Future()
    context = copy_context()
    future.set_running_or_notify_cancel()  # it cannot be cancelled; a task that waits for it can

    def run() -> None:
        try:
            future.set_result(context.run(function))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class DaemonThreads(Executor):
    """An executor with as many threads as it has calls at a time, which do not keep the process from ending if one is stuck."""

    def __init__(self, name: str) -> None:
        """Give all threads a name."""
        self._name = name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)

    @override
    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(call)
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._run_calls, name=self._name, daemon=True).start()
        return future

    def _run_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            self._idle.release()
        self._calls.put(None)  # for the next thread

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._calls.put(None)


async def run_start(start: Callable[[], T]) -> T:
    """Call a function in a thread that starts child processes and blocks until they answer.

    If this is cancelled, the children are killed, and it ends once the function has ended. A result is then lost: the function
    itself hands over what has started to what will stop it.
    """
    children = StartedChildren()
    token = started_children.set(children)
    try:
        starting = asyncio.ensure_future(asyncio.to_thread(start))
    finally:
        started_children.reset(token)
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        children.end()
        await asyncio.gather(starting, return_exceptions=True)
        raise


@asynccontextmanager
async def first_ended(*awaitables: Awaitable[Any]) -> AsyncIterator[list[asyncio.Future[Any]]]:
    """Context that is entered when the first of ``awaitables`` has ended; yields their tasks, and cancels them at its end."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
