"""Threads of episodes: few for calls that end at once, as many as block otherwise."""

import asyncio
import gc
import threading
import weakref
from itertools import pairwise

import pytest

from agentrl.episode.thread_pool import BATCH, EpisodeThreads


def call(threads, function):
    return asyncio.get_running_loop().run_in_executor(threads, function)


def test_a_burst_of_short_calls_needs_no_thread_for_each():
    async def burst():
        threads = EpisodeThreads(4096)
        results = await asyncio.gather(*(call(threads, lambda number=number: number) for number in range(4096)))
        return results, threads.count

    results, count = asyncio.run(burst())
    assert results == list(range(4096))
    assert count < 64


def test_calls_that_block_run_at_the_same_time_up_to_the_limit():
    async def blocked(most):
        threads, barrier = EpisodeThreads(most), threading.Barrier(most)
        await asyncio.gather(*(call(threads, lambda: barrier.wait(10)) for _ in range(3 * most)))
        return threads.count

    assert asyncio.run(blocked(6)) == 6


def test_what_a_call_raises_is_raised_where_it_is_awaited():
    async def failing(function):
        await call(EpisodeThreads(1), function)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(failing(lambda: 1 // 0))
    with pytest.raises(
        RuntimeError, match="StopIteration"
    ):  # a future of asyncio cannot hold it: the episode would hang
        asyncio.run(failing(lambda: next(iter(()))))


def test_a_call_that_was_cancelled_before_it_began_is_not_made():
    made, begun, go_on = [], threading.Event(), threading.Event()

    async def cancelled():
        threads = EpisodeThreads(1)
        first = call(threads, lambda: (begun.set(), go_on.wait(10)))
        second = call(threads, lambda: made.append("second"))
        second.cancel()
        go_on.set()
        await first
        await call(threads, lambda: made.append("third"))

    asyncio.run(cancelled())
    assert made == ["third"]


def test_a_loop_that_ended_during_a_call_disturbs_no_later_one():
    threads, go_on = EpisodeThreads(2), threading.Event()

    async def abandoned():
        call(threads, lambda: go_on.wait(10))

    asyncio.run(abandoned())
    go_on.set()

    async def later():
        return await asyncio.gather(*(call(threads, lambda: 7) for _ in range(BATCH + 1)))

    assert set(asyncio.run(later())) == {7}


def test_results_come_in_batches_between_which_others_run():
    async def burst():
        threads, seen, others = EpisodeThreads(1), [], asyncio.get_running_loop()

        def tick():
            seen.append(sum(one.done() for one in calls))
            if not all(one.done() for one in calls):
                others.call_soon(tick)

        gate = threading.Event()
        call(threads, gate.wait)
        calls = [call(threads, lambda: None) for _ in range(10 * BATCH)]
        others.call_soon(tick)
        gate.set()
        await asyncio.gather(*calls)
        return seen

    seen = asyncio.run(burst())
    assert max(after - before for before, after in pairwise(seen)) <= 2 * BATCH


def test_threads_end_with_their_owner():
    async def use():
        threads = EpisodeThreads(3)
        barrier = threading.Barrier(3)
        await asyncio.gather(*(call(threads, lambda: barrier.wait(10)) for _ in range(3)))
        return weakref.ref(threads)

    before = set(threading.enumerate())
    owner = asyncio.run(use())
    gc.collect()
    assert owner() is None
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()
