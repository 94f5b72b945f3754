"""Batches of calls that wait at the same time."""

import asyncio
from collections.abc import Sequence

import pytest
from deadlines import run_ready_tasks

from agentrl.core.errors import ToolFailure
from agentrl.toolserver.batcher import Batcher
from tests.unit.toolserver.fake_hosts import in_loop


class Doubling:
    """Doubles numbers in batches, once ``gate`` is open."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()
        self.running = self.most = 0

    async def __call__(self, numbers: Sequence[int]) -> list[int]:
        self.batches.append(list(numbers))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.gate.wait()
        finally:
            self.running -= 1
        if -1 in numbers:
            raise ToolFailure("no negative numbers")
        return [2 * number for number in numbers]


@in_loop
async def test_calls_that_wait_share_a_batch_and_get_their_own_results() -> None:
    work = Doubling()
    batcher = Batcher(work, max_batch=8, concurrent=2)
    calls = [batcher.submit(number) for number in range(30)]
    await run_ready_tasks()
    assert [len(batch) for batch in work.batches] == [8, 8]
    work.gate.set()
    assert await asyncio.gather(*calls) == [2 * number for number in range(30)]
    assert [len(batch) for batch in work.batches] == [8, 8, 8, 6]
    assert work.most == 2
    assert await batcher.submit(7) == 14, "a batcher that was idle goes on"


@in_loop
@pytest.mark.timeout(20)
async def test_a_caller_that_calls_again_at_once_is_answered() -> None:
    """Its next item comes when the last worker has just ended."""
    work = Doubling()
    work.gate.set()
    batcher = Batcher(work, max_batch=2, concurrent=1)

    async def caller(first: int) -> list[int]:
        return [await batcher.submit(first + number) for number in range(5)]

    assert await asyncio.gather(caller(0), caller(10)) == [[0, 2, 4, 6, 8], [20, 22, 24, 26, 28]]


@in_loop
async def test_an_error_is_raised_to_each_caller_of_its_batch_alone() -> None:
    work = Doubling()
    work.gate.set()
    batcher = Batcher(work, max_batch=2, concurrent=1)
    results = await asyncio.gather(*(batcher.submit(n) for n in (1, 2, -1, 3, 4)), return_exceptions=True)
    assert [results[0], results[1], results[4]] == [2, 4, 8]
    first, second = results[2], results[3]
    assert isinstance(first, ToolFailure)
    assert isinstance(second, ToolFailure)
    assert first is not second
    assert str(first) == "no negative numbers"


@in_loop
async def test_a_caller_that_is_cancelled_leaves_the_others_alone() -> None:
    work = Doubling()
    batcher = Batcher(work, max_batch=2, concurrent=1)
    calls = [batcher.submit(number) for number in range(5)]
    await run_ready_tasks()
    calls[0].cancel()
    calls[3].cancel()
    work.gate.set()
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert [done[1], done[2], done[4]] == [2, 4, 8]
    assert work.batches == [[0, 1], [2, 4]]


@in_loop
async def test_closing_answers_every_caller() -> None:
    work = Doubling()
    batcher = Batcher(work, max_batch=2, concurrent=1)
    calls = [batcher.submit(number) for number in range(5)]
    await run_ready_tasks()
    await batcher.close(ToolFailure("closed"))
    for result in await asyncio.gather(*calls, return_exceptions=True):
        with pytest.raises(ToolFailure, match="closed"):
            raise result  # type: ignore[misc]
    assert work.running == 0
