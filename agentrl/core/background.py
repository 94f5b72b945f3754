"""Work in a thread that does not keep the process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_in_daemon_thread(function: Callable[[], T], name: str) -> Future[T]:
    """Call a function in a new daemon thread ``name``; the future has its result or its error."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # it cannot be cancelled; a task that waits for it can

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
