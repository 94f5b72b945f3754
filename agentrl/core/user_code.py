"""Calls of code that users write: rewards, tools, environments, loops, filters, data sources.

`user_error` decides for all of them what ends the run. The run's own cancellation and Ctrl-C do. Everything else that the
code raises is a failure of the code: SystemExit, GeneratorExit and a CancelledError that the run has not requested, too, also
in tasks that the code has started itself.
Ctrl-C raises KeyboardInterrupt in the main thread only. One that code raises there cannot be distinguished from it and ends the
run; in any other thread it is a failure of the code.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import math
import os
import sysconfig
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, SupportsFloat, TypeVar

from typing_extensions import override

from agentrl.core.background import run_in_daemon_thread
from agentrl.core.errors import AgentrlError, ConfigError

T = TypeVar("T")

MAX_SECONDS = 1e9
"""Limit of times: threads and sockets cannot wait for 300 years."""
END_S = 1.0
"""Seconds that a coroutine has to end after its time limit; then it is left alone."""
CLOSE_S = 30.0
"""Seconds that a coroutine has to end once it is cancelled; then it is closed, as its event loop could not end before it."""
_MAX_MESSAGE = 2_000
"""Characters of an exception's message in one line."""
_UNFIT = (StopIteration, TimeoutError, concurrent.futures.CancelledError)
"""A future refuses the first, and asyncio makes others of the rest, without their lines."""
_running: set[asyncio.Task[object]] = set()
"""Coroutines of the user; a task that nothing holds may be collected while it runs."""
_is_user_task: contextvars.ContextVar[bool] = contextvars.ContextVar("is_user_task", default=False)
"""Whether the current task runs a coroutine of the user, or was started by one."""
_LIBRARIES = (str(Path(__file__).parents[1]) + os.sep, sysconfig.get_path("stdlib") + os.sep)
"""Folders of agentrl and of Python's own modules."""


def is_finite(number: SupportsFloat) -> bool:
    """Return whether a number that the code has returned is finite. An integer that no float holds is not."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


class TimeLimitExceeded(Exception):
    """User code took longer than its time limit."""


class _Carried(Exception):
    """Carries an exception that a thread's future or a task cannot hold: SystemExit, StopIteration, CancelledError."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def user_error(error: BaseException) -> BaseException:
    """Return what user code raised, as caught by ``except BaseException`` around the call; raise what ends the run.

    Raises:
        CancelledError: the run has cancelled the current task, whatever the code made of it.
        KeyboardInterrupt: raised in the main thread.
    """
    task = _current_task()
    if task is not None and task.cancelling():
        if isinstance(error, asyncio.CancelledError):
            raise error
        raise asyncio.CancelledError from error
    if isinstance(error, _Carried):
        return error.error
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        raise error
    return error


@contextmanager
def user_code(failure: Callable[[BaseException], Exception]) -> Iterator[None]:
    """Raise ``failure(error)`` in place of what user code in the body raises. An `AgentrlError` is raised as it is."""
    try:
        yield
    except AgentrlError:
        raise
    except BaseException as caught:
        error = user_error(caught)
        failed = failure(error)
        if failed is caught:
            raise
        raise failed from error


def calling(call: str, hint: str = "") -> AbstractContextManager[None]:
    """Raise a `ConfigError` "``call`` raised …" in place of what user code in the body raises; see `user_code`."""
    return user_code(lambda error: ConfigError(f"{call} raised {describe(error)}{hint}"))


async def await_user_code(work: Awaitable[T], limit_s: float | None = None) -> T:
    """Return the result of a coroutine of the user, run in a separate task: code may cancel its own task.

    Args:
        work: the coroutine.
        limit_s: seconds it may take. Then it is cancelled, and has `END_S` to end.

    Raises:
        TimeLimitExceeded: it took longer.
        BaseException: what the code raises; see `user_error`.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    if loop.get_task_factory() is None:
        loop.set_task_factory(_make_task)
    closable = _Closable(_carry(work))
    task = loop.create_task(closable)
    _running.add(task)
    task.add_done_callback(_forget)
    try:
        finished, _ = await asyncio.wait({task}, timeout=limit_s)
    except asyncio.CancelledError:
        if _cancel(task, closable):
            await asyncio.wait({task})
        raise
    seconds = loop.time() - started
    if finished and (limit_s is None or seconds <= limit_s):
        return task.result()
    if finished:
        raise TimeLimitExceeded(
            f"it blocked the event loop and took {seconds:.1f} s, longer than {limit_s:g} s: write it as a plain function"
        )
    _cancel(task, closable)
    await asyncio.wait({task}, timeout=END_S)
    raise TimeLimitExceeded(f"it took longer than {limit_s:g} s")


async def call_in_thread(function: Callable[[], T], name: str) -> T:
    """Return the result of a function of the user, called in a new daemon thread: it cannot keep the process from ending.

    If the caller is cancelled, the thread runs on.

    Raises:
        BaseException: what the function raises; see `user_error`.
    """
    context = contextvars.copy_context()

    def work() -> T:
        try:
            return context.run(function)
        except BaseException as error:
            raise as_future_error(error) from None

    return await asyncio.wrap_future(run_in_daemon_thread(work, name))


async def _carry(work: Awaitable[T]) -> T:
    _is_user_task.set(True)
    try:
        return await work
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise _Carried(error) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise as_future_error(error) from None


class _UserCoroutine(Coroutine[object, object, T]):
    """A coroutine around one of the user."""

    def __init__(self, work: Coroutine[object, object, T]) -> None:
        self._work = work

    @override
    def send(self, value: object) -> object:
        return self._work.send(value)

    @override
    def throw(self, *error: Any) -> object:
        return self._work.throw(*error)

    @override
    def close(self) -> None:
        self._work.close()

    @override
    def __await__(self) -> Generator[object, object, T]:
        return self._work.__await__()


class _WithoutExit(_UserCoroutine[T]):
    """A coroutine of the user whose SystemExit does not end the event loop in which its task runs."""

    @override
    def send(self, value: object) -> object:
        with _carry_exit():
            return super().send(value)

    @override
    def throw(self, *error: Any) -> object:
        with _carry_exit():
            return super().throw(*error)


class _Closable(_UserCoroutine[T]):
    """A coroutine of the user that ends when it is cancelled, whatever it makes of that, once `must_end` is set."""

    must_end = False

    @override
    def throw(self, *error: Any) -> object:
        if not self.must_end:
            return super().throw(*error)
        try:
            self.close()
        except KeyboardInterrupt:
            raise
        except BaseException as ignored:  # such as "coroutine ignored GeneratorExit"
            raise asyncio.CancelledError from ignored
        raise asyncio.CancelledError


def _cancel(task: asyncio.Task[T], closable: _Closable[T]) -> bool:
    """Cancel the task of a coroutine, and close the coroutine if it continues for `CLOSE_S`. Return whether it had not ended."""

    def close() -> None:
        closable.must_end = True
        task.cancel()

    if not task.cancel():
        return False
    timer = task.get_loop().call_later(CLOSE_S, close)
    task.add_done_callback(lambda _: timer.cancel())
    return True


@contextmanager
def _carry_exit() -> Iterator[None]:
    try:
        yield
    except SystemExit as error:
        raise _Carried(error) from error


def _make_task(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T] | Generator[Any, None, T], **options: Any
) -> asyncio.Task[T]:
    """Return a task of an event loop; see `_WithoutExit`."""
    if _is_user_task.get() and asyncio.iscoroutine(work):
        work = _WithoutExit(work)
    return asyncio.Task(work, loop=loop, **options)


def as_future_error(error: BaseException) -> Exception:
    """Return an error of user code as an exception that a future can hold. `user_error` returns what it was."""
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
        return _Carried(error.__cause__)  # which a coroutine raises in this disguise, without the author's line
    if isinstance(error, Exception) and not isinstance(error, _UNFIT):
        return error
    return _Carried(error)


def _current_task() -> asyncio.Task[object] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None


def _forget(task: asyncio.Task[object]) -> None:
    _running.discard(task)
    if not task.cancelled():
        task.exception()  # marks it as retrieved


def describe(error: BaseException) -> str:
    """Return an exception in one line: class, message, and the author's line where it arose (`error_location`).

    Example: ``ValueError: no number in 'abc' (my_rewards.py:12)``.
    """
    message = " ".join(error_message(error.msg if isinstance(error, SyntaxError) else error).split()) or "no message"
    if len(message) > _MAX_MESSAGE:
        message = f"{message[:_MAX_MESSAGE]}… ({len(message):,} characters)"
    file, line = error_location(error)
    location = f" ({Path(file).name}:{line})" if file else ""
    return f"{type(error).__name__}: {message}{location}"


def error_message(error: object) -> str:
    """Return the text of an exception, whose class may be the author's and fail to make it."""
    try:
        return str(error)
    except Exception as fault:
        return f"(its message cannot be shown: __str__ raised {type(fault).__name__})"


def error_location(error: BaseException) -> tuple[str, int]:
    """Return file and line of the innermost call outside agentrl, Python and installed packages, or of the innermost one.

    The file is empty if the exception was not raised.
    """
    if isinstance(error, SyntaxError) and error.filename is not None:
        return error.filename, error.lineno or 0
    frames = traceback.extract_tb(error.__traceback__)
    frame = next(
        (frame for frame in reversed(frames) if not is_library(frame.filename)), frames[-1] if frames else None
    )
    return (frame.filename, frame.lineno or 0) if frame is not None else ("", 0)


def is_library(file: str) -> bool:
    """Return whether a file is of agentrl, of Python, or of an installed package."""
    installed = {"site-packages", "dist-packages"} & {*Path(file).parts}
    return bool(installed) or file.startswith(("<", *_LIBRARIES))
