"""Runs a coroutine to its end from plain code: in a script, in a notebook whose event loop runs already, in any thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TypeVar

from agentrl.core.background import run_in_daemon_thread
from agentrl.core.errors import ConfigError
from agentrl.core.imports import importing_file
from agentrl.core.kernel_cache import share_kernels
from agentrl.runtime.interrupt import interrupts_by_caller

T = TypeVar("T")
_busy = threading.Lock()
"""Held while this process runs something: Ray, environment variables and signals are the process's."""
_PREFIXES = (
    "AGENTRL_", "CUDA_", "FLASHINFER_", "GOMP_SPINCOUNT", "MLFLOW_", "PYTHONBREAKPOINT", "RAY_", "SGLANG_", "TORCHINDUCTOR_",
    "TRACKIO_", "TRITON_", "TVM_", "WANDB_",
)  # fmt: skip
"""Environment variables that a run may set."""


def run_to_end(work: Callable[[], Coroutine[object, None, T]], function: str) -> T:
    """Run a coroutine to its end in a new event loop, and return its result.

    Where an event loop runs already, as in a notebook, the new one is in a thread. Ctrl-C, or the interrupt of a notebook's
    kernel, ends the work in order; a second one ends it at once.

    Args:
        work: returns the coroutine.
        function: name of the calling function, for messages.

    Raises:
        ConfigError: this process runs something already, or a module that agentrl imports calls this.
        BaseException: of the coroutine.
    """
    if (file := importing_file()) is not None:
        raise ConfigError(
            f"{function} was called while agentrl imports {file}, which each process of a run does: put the call under "
            'if __name__ == "__main__":'
        )
    if not _busy.acquire(blocking=False):
        raise ConfigError(f"{function}: this process trains or samples already, and can do so once at a time")
    try:
        with unchanged_environment():
            share_kernels()
            if _loop_is_running():
                return _run_in_thread(work)
            return asyncio.run(work())
    finally:
        _busy.release()


def _loop_is_running() -> bool:
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        return True
    return False


def _run_in_thread(work: Callable[[], Coroutine[object, None, T]]) -> T:
    """Run the coroutine in a thread while this one waits, and hand Ctrl-C over."""
    tasks: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []
    interrupts = 0

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None, "this is a task"
        tasks.append((asyncio.get_running_loop(), task))
        if interrupts:
            raise asyncio.CancelledError
        return await work()

    with interrupts_by_caller() as request:

        def on_interrupt(number: int, frame: FrameType | None) -> None:
            nonlocal interrupts
            interrupts += 1
            if (interrupts > 1 or not request()) and tasks:
                loop, task = tasks[0]
                with suppress(RuntimeError):  # it has ended
                    loop.call_soon_threadsafe(task.cancel)

        with _handled_interrupts(on_interrupt):
            try:
                return run_in_daemon_thread(lambda: asyncio.run(main()), "agentrl").result()
            except (asyncio.CancelledError, concurrent.futures.CancelledError):
                if interrupts:
                    raise KeyboardInterrupt from None
                raise


@contextmanager
def _handled_interrupts(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have Ctrl-C call a function in the main thread; in other threads it is not theirs."""
    earlier_handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(earlier_handler):
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier_handler)


@contextmanager
def unchanged_environment() -> Iterator[None]:
    """Set environment variables of agentrl and the libraries of a run back to what they were."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith(_PREFIXES) and name not in variables]:
            del os.environ[name]
        os.environ.update(variables)
