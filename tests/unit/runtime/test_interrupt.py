"""Signals end what runs, once and in good order."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
from deadlines import run_ready_tasks

from agentrl.core.errors import RunStopped
from agentrl.runtime.interrupt import SIGNALS, Interrupt, handled_signals, leave_terminals


@pytest.fixture(autouse=True)
def inherited_handlers() -> Iterator[None]:
    """Tests start with the handlers of a program in a terminal: one in the background ignores Ctrl-C."""
    handlers_before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in handlers_before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_cancels_what_is_guarded_and_is_acknowledged_once(number: signal.Signals) -> None:
    cancelled, lines = [], []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def main() -> None:
        with Interrupt(lines.append) as interrupt:
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), number)
            for _ in range(2):
                with pytest.raises(RunStopped, match=number.name):
                    async with interrupt.guard():
                        await work()
            await asyncio.sleep(0)  # no cancellation is left over

    asyncio.run(main())
    assert cancelled == [True]
    assert lines == [f"{number.name}: stopping. Ctrl-C again stops at once, without saving."]
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_only_a_second_ctrl_c_ends_at_once(first: signal.Signals, second: signal.Signals) -> None:
    saved = []

    async def main() -> None:
        with Interrupt(lambda line: None) as interrupt:
            os.kill(os.getpid(), first)
            await interrupt.requested.wait()
            os.kill(os.getpid(), second)
            await run_ready_tasks()
            saved.append(True)

    if first == second == signal.SIGINT:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main())
    else:
        asyncio.run(main())
        assert saved


def test_a_signal_is_handled_though_the_output_is_gone() -> None:
    """Ctrl-C ends ``tee``, too."""
    faults: list[object] = []

    def notify(_: str) -> None:
        raise BrokenPipeError

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        with Interrupt(notify) as interrupt:
            os.kill(os.getpid(), signal.SIGINT)
            await interrupt.requested.wait()
            await run_ready_tasks()

    asyncio.run(main())
    assert not faults


def test_nohup_is_respected() -> None:
    assert handled_signals() == list(SIGNALS)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert signal.SIGHUP not in handled_signals()

    async def main() -> None:
        with Interrupt(print) as interrupt:
            os.kill(os.getpid(), signal.SIGHUP)
            await run_ready_tasks()
            interrupt.check()

    asyncio.run(main())
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_closed_terminal_is_left() -> None:
    screen, terminal = os.openpty()
    try:
        os.write(terminal, b"seen")
        leave_terminals([terminal])
        assert os.isatty(terminal), "a signal alone does not close it"
        os.close(screen)
        with pytest.raises(OSError, match="Input/output"):
            os.write(terminal, b"lost")
        leave_terminals([terminal])
        assert os.write(terminal, b"discarded") == 9
    finally:
        os.close(terminal)


def test_a_watch_that_raises_cancels_what_is_guarded() -> None:
    def dead() -> None:
        raise OSError("the server is dead")

    async def main() -> None:
        with Interrupt(print) as interrupt, pytest.raises(OSError, match="dead"):
            async with interrupt.guard(dead):
                await asyncio.sleep(60)

    asyncio.run(main())


def test_a_guarded_body_keeps_its_results_and_errors() -> None:
    async def fails() -> int:
        raise ValueError("inner")

    async def main() -> None:
        with Interrupt(print) as interrupt:
            async with interrupt.guard():
                assert await asyncio.sleep(0, result=3) == 3
            with pytest.raises(ValueError, match="inner"):
                async with interrupt.guard():
                    await fails()

    asyncio.run(main())


def test_a_cancellation_from_elsewhere_passes_the_guard() -> None:
    async def guarded() -> None:
        with Interrupt(print) as interrupt:
            async with interrupt.guard():
                await asyncio.sleep(60)

    async def main() -> None:
        task = asyncio.create_task(guarded())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
