"""An event loop whose clock jumps to the next timer, for simulations: nothing waits, and threads run at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Instant(selectors.SelectSelector):
    """Adds the time that a selector would wait to its clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready.

        Raises:
            RuntimeError: the loop waits, and nothing can end that.
        """
        if timeout is None:
            raise RuntimeError("nothing is left that could happen")
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop with virtual seconds. Functions for threads are called in the loop, and take no time."""

    def __init__(self) -> None:
        """Begin at 0 s."""
        self._instant = _Instant()
        super().__init__(self._instant)

    def time(self) -> float:
        """Return the virtual seconds since the beginning."""
        return self._instant.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Call ``func`` now."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, as `asyncio.run` does, in virtual time."""
    results: list[T] = []

    async def run_main() -> None:
        """Return nothing: Python 3.11 makes a text of the result, which may be thousands of rollouts."""
        results.append(await main)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run_main())
    return results[0]
