"""Coroutines that run to their end from plain code, also where an event loop runs already."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

from agentrl.api.event_loop import run_to_end
from agentrl.core.errors import ConfigError, RunStopped
from agentrl.core.imports import load_object
from agentrl.obs.watchdog import Watchdog
from agentrl.runtime.interrupt import Interrupt


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)]


async def until_stopped(interrupts: int = 1) -> str:
    """Work that is interrupted by signals that this process gets while it runs."""
    with Interrupt(lambda _: None) as interrupt, Watchdog(0.0, print):
        os.environ["RAY_LEFT_BY_A_RUN"] = "1"
        for _ in range(interrupts):
            os.kill(os.getpid(), signal.SIGINT)
        await interrupt.requested.wait()
        if interrupts > 1:
            await asyncio.Event().wait()
        interrupt.check()
    return "not interrupted"


@pytest.mark.parametrize("in_notebook", [False, True])
def test_an_interrupt_ends_the_work_in_order_and_leaves_nothing(in_notebook: bool) -> None:
    async def cell() -> None:
        run_to_end(until_stopped, "agentrl.train")

    own = signal.signal(signal.SIGTERM, lambda *_: None)
    before = (handlers(), threading.active_count(), dict(os.environ))
    try:
        with pytest.raises(RunStopped, match="interrupted by SIGINT"):
            asyncio.run(cell()) if in_notebook else run_to_end(until_stopped, "agentrl.train")
        assert (handlers(), threading.active_count(), dict(os.environ)) == before
    finally:
        signal.signal(signal.SIGTERM, own)


def test_before_there_is_work_to_end_in_order_an_interrupt_cancels_it() -> None:
    async def start() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    async def cell() -> None:
        run_to_end(start, "agentrl.train")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell())


def test_results_and_errors_are_those_of_the_coroutine_in_any_thread() -> None:
    async def answer() -> int:
        with Interrupt(print), Watchdog(0.0, print):
            return 42

    async def cell() -> int:
        return run_to_end(answer, "agentrl.train")

    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(run_to_end(answer, "agentrl.train")))
    thread.start()
    thread.join()
    assert [*results, asyncio.run(cell()), run_to_end(answer, "agentrl.train")] == [42, 42, 42]


def test_a_process_does_one_thing_at_a_time() -> None:
    async def nested() -> None:
        await asyncio.to_thread(run_to_end, until_stopped, "agentrl.evaluate")

    with pytest.raises(ConfigError, match=r"agentrl\.evaluate: this process trains or samples already"):
        run_to_end(nested, "agentrl.train")


def test_a_script_without_a_guard_does_not_train_in_each_process_that_imports_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from agentrl.api.event_loop import run_to_end\n\nrun_to_end(None, 'agentrl.train')\n")
    with pytest.raises(ConfigError, match=r'script\.py, which each process of a run does: .*if __name__ == "__main__"'):
        load_object(f"{script}:score", "reward.function")
