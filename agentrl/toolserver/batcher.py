"""Batching of single calls that wait at the same time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Batcher(Generic[T, R]):
    """Runs single items in batches: while one batch runs, the items of the next one gather. Belongs to one event loop.

    No item waits for a time window: batches are as large as the load makes them.

    Args:
        run: runs a batch and returns a result for each item, in order. A result that is an exception is raised to the
            caller of its item, an error of ``run`` to every caller of the batch.
        max_batch: the largest batch.
        concurrent: batches that run at the same time.
    """

    def __init__(
        self, run: Callable[[Sequence[T]], Awaitable[Sequence[R | Exception]]], *, max_batch: int, concurrent: int
    ) -> None:
        self._run = run
        self._max_batch = max_batch
        self._concurrent = concurrent
        self._waiting: deque[tuple[T, asyncio.Future[R]]] = deque()
        self._workers: set[asyncio.Task[None]] = set()
        self._closed: Exception = RuntimeError("the batcher was cancelled")

    def submit(self, item: T) -> asyncio.Future[R]:
        """Return the future of the item's result. Cancelling it leaves the others of its batch alone."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if len(self._workers) < self._concurrent:
            worker = asyncio.create_task(self._work(), name="batcher")
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)
        return future

    async def _work(self) -> None:
        try:
            while self._waiting:
                batch: list[tuple[T, asyncio.Future[R]]] = []
                while self._waiting and len(batch) < self._max_batch:
                    item, future = self._waiting.popleft()
                    if not future.done():
                        batch.append((item, future))
                if batch:
                    await self._run_batch(batch)
        finally:
            # Not only in the done callback: it runs after the callers of the last batch, whose next items would wait for
            # a worker that takes none any more.
            task = asyncio.current_task()
            assert task is not None
            self._workers.discard(task)

    async def _run_batch(self, batch: Sequence[tuple[T, asyncio.Future[R]]]) -> None:
        results: Sequence[R | Exception]
        try:
            results = await self._run([item for item, _ in batch])
            if len(results) != len(batch):
                raise RuntimeError(f"a batch of {len(batch)} has {len(results)} results")
        except Exception as error:
            results = [_copy(error) for _ in batch]
        except asyncio.CancelledError:
            _settle(batch, [_copy(self._closed) for _ in batch])
            raise
        _settle(batch, results)

    async def close(self, error: Exception) -> None:
        """Cancel running batches; every unanswered call raises ``error``."""
        self._closed = error
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(_copy(error))
        workers = list(self._workers)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def _settle(batch: Sequence[tuple[T, asyncio.Future[R]]], results: Sequence[R | Exception]) -> None:
    for (_, future), result in zip(batch, results, strict=True):
        if future.done():
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


def _copy(error: Exception) -> Exception:
    """Return a new error of the same kind: a shared one would collect the tracebacks of all that raise it."""
    try:
        return type(error)(*error.args)
    except TypeError:
        return error
