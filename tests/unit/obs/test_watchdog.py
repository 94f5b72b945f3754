"""Reports of the watchdog, and when there is none."""

import asyncio
import contextvars
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from deadlines import until

from agentrl.obs import watchdog
from agentrl.obs.waiting import PHASE, WaitRegistry, waiting
from agentrl.obs.watchdog import Watchdog


@pytest.fixture
def waits():
    waits = WaitRegistry()
    token = waits.enter()
    yield waits
    waits.leave(token)


def texts(waits):
    return [(wait.phase, wait.text) for wait in waits.innermost_waits()]


def watch(stall_warning_s, run, log=None):
    """Run ``run(reports)`` under a watchdog and return its reports."""
    reports = []

    async def watched():
        with Watchdog(stall_warning_s, reports.append, log):
            await run(reports)

    asyncio.run(watched())
    return reports


def test_the_innermost_waits_are_named_with_those_they_are_in(waits):
    turn = 1
    with waiting(PHASE, "step 3", "rollout"), waiting("rollout", "3/0/1", lambda: f"turn {turn}"):
        assert texts(waits) == [("step 3, rollout", "rollout 3/0/1, turn 1")]
        turn = 2
        with waiting("tool", "search", "", "call search-1"):
            assert texts(waits) == [("step 3, rollout", "rollout 3/0/1, turn 2: tool search, call search-1")]
        assert [wait.kind for wait in waits.innermost_waits()] == ["rollout"]
    assert not waits.innermost_waits()


def test_tasks_and_threads_wait_for_what_they_were_started_in(waits):
    async def run():
        gate = threading.Event()

        def blocked():
            with waiting("learner", "rank 0"):
                gate.wait(10)

        async def request(name):
            with waiting("engine", name):
                await asyncio.sleep(10)

        with waiting(PHASE, "train"):
            thread = asyncio.create_task(asyncio.to_thread(blocked))
            await until(lambda: waits.innermost_waits()[0].kind == "learner")
            tasks = [asyncio.create_task(request(name)) for name in "ab"]
            await until(lambda: len(waits.innermost_waits()) == 3)
            assert texts(waits) == [("train", "learner rank 0"), ("train", "engine a"), ("train", "engine b")]
            for task in tasks:
                task.cancel()
            gate.set()
            await asyncio.gather(thread, *tasks, return_exceptions=True)
            assert texts(waits) == [("train", "")]

    asyncio.run(run())


def test_a_task_that_outlives_what_it_was_started_in_waits_for_itself_alone(waits):
    async def run():
        async def watch():
            with waiting("engine", "a"):
                await asyncio.sleep(10)

        with waiting(PHASE, "start"), waiting("stack"):
            task = asyncio.create_task(watch())
            await asyncio.sleep(0)
            assert texts(waits) == [("start", "stack: engine a")]
        assert texts(waits) == [("", "engine a")]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_only_an_exit_without_an_error_is_progress(waits):
    waits.last_progress = 0.0
    with pytest.raises(ZeroDivisionError), waiting("tool"):
        raise ZeroDivisionError
    assert waits.last_progress == 0.0
    with waiting("tool"):
        pass
    assert time.monotonic() - waits.last_progress < 5


def test_without_a_watchdog_nothing_is_kept(waits):
    def elsewhere():
        with waiting("tool"):
            assert not waits.innermost_waits()

    contextvars.Context().run(elsewhere)


def test_a_closed_coroutine_keeps_the_waits_of_others(waits):
    class Never:
        def __await__(self):
            yield

    async def lost():
        with waiting("tool", "lost"):
            await Never()

    coroutine = lost()
    contextvars.copy_context().run(coroutine.send, None)
    with waiting("tool", "kept"):
        coroutine.close()
        assert texts(waits) == [("", "tool kept")]
        with waiting("call", "1"):
            assert texts(waits) == [("", "tool kept: call 1")]


def test_no_report_while_there_is_progress():
    async def run(reports):
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            with waiting("tool"):
                await asyncio.sleep(0.02)

    assert watch(1.0, run) == []


def test_it_reports_again_after_twice_as_long_and_when_the_run_continues(tmp_path):
    log = tmp_path / "logs" / "watchdog.log"

    async def run(reports):
        with waiting(PHASE, "step 1", "rollout"), waiting("tool", "search"):
            await until(lambda: len(reports) > 2)
        await until(lambda: len(reports) > 3)

    begun = time.monotonic()
    first, second, third, end, *_ = watch(0.3, run, log)
    reports = [first, second, third]
    assert time.monotonic() - begun >= 1.2
    ages = [float(re.search(r"nothing has ended for ([\d.]+)s", report)[1]) for report in reports]
    assert ages[0] >= 0.3
    assert ages[1] >= 0.6
    assert ages[2] >= 1.2
    for report in reports:
        assert "step 1, rollout, waiting for\n    tool search, since " in report
        assert str(log) in report
    assert "the run continues" in end
    written = log.read_text()
    assert written.count("    tool search, since ") == 3
    assert written.count("in _watch") >= 3, "with the stacks of all threads"


def test_it_goes_on_without_a_log_on_a_full_disk():
    async def run(reports):
        with waiting("tool", "search"):
            await until(lambda: len(reports) > 1)

    first, second, *_ = watch(0.1, run, Path("/dev/full"))
    assert "tool search, since " in first
    assert "tool search, since " in second


def test_many_waits_are_counted():
    async def run(reports):
        async def ask(kind, number):
            with waiting(kind, str(number)):
                await until(lambda: any("tool" in report for report in reports))

        await asyncio.gather(*(ask("engine", number) for number in range(9)), ask("tool", 9))

    report = watch(0.2, run)[-1]  # on a busy machine the first may come before all wait
    assert report.count("engine ") == 8
    assert report.endswith("and 1 more: engine, 1 more: tool")


def test_a_call_that_blocks_the_event_loop_is_named():
    async def run(reports):
        def never_returns():
            end = time.monotonic() + 10
            while not reports and time.monotonic() < end:
                time.sleep(0.01)

        with waiting("environment", "Slow.astep"):
            never_returns()

    report = watch(0.2, run)[0]
    assert re.search(r"the event loop is blocked by a call in\n    .*test_watchdog\.py:\d+ in never_returns", report)
    assert "environment Slow.astep" in report


def test_a_loop_that_is_blocked_again_and_again_is_reported_though_calls_end(monkeypatch):
    """A coroutine that blocks stalls all episodes, and its own calls end."""
    monkeypatch.setattr(watchdog, "BLOCKED_S", 0.1)
    monkeypatch.setattr(watchdog, "RECHECK_S", 0.02)

    async def run(reports):
        def blocks():
            end = time.monotonic() + 10
            while len(reports) < 1 and time.monotonic() < end:
                with waiting("tool", "quick"):
                    time.sleep(0.01)

        blocks()

    [report] = watch(60, run)
    assert re.search(r"event loop has been blocked for 0\.\ds, and all episodes wait for it\n", report)
    assert re.search(r"blocked by a call in\n    .*test_watchdog\.py:\d+ in blocks", report)


def test_a_signal_requests_a_report_at_once():
    handlers_before = signal.getsignal(signal.SIGUSR1)

    async def run(reports):
        with waiting("engine", "http://127.0.0.1:1"):
            os.kill(os.getpid(), signal.SIGUSR1)
            await until(lambda: reports)

    [report] = watch(0, run)
    assert "requested by SIGUSR1" in report
    assert "engine http://127.0.0.1:1" in report
    assert signal.getsignal(signal.SIGUSR1) == handlers_before
