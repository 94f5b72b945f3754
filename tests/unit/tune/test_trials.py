"""What the command receives of a process of trials that works, fails, ends or takes too long."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from agentrl.core.child_process import ChildProcess
from agentrl.core.errors import TrialError
from agentrl.obs.step_times import StepTimes
from agentrl.tune.trials import TrialProcess

STEP = StepTimes(2, 1.5, {}, {"rollout/sampled_tokens": 10.0})
ENDLESS = "import signal; signal.pause()"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], tuple[TrialProcess, Connection]]]:
    """Return a function that starts a program in place of a run, and returns it with the run's end of the connection."""
    processes: list[TrialProcess] = []

    def start_program(program: str) -> tuple[TrialProcess, Connection]:
        near, far = multiprocessing.Pipe()
        command = [sys.executable, "-S", "-c", program]
        child = ChildProcess.start(command, log=tmp_path / "trial.log", name="the trial", error=TrialError)
        processes.append(TrialProcess(child, near, {}, tmp_path))
        return processes[-1], far

    yield start_program
    for process in processes:
        process.kill()


Start = Callable[[str], tuple[TrialProcess, Connection]]


def in_a_minute() -> float:
    return time.monotonic() + 60


def test_steps_are_received_and_an_error_is_raised(start: Start) -> None:
    process, run = start(ENDLESS)
    for reply in (None, STEP, "EngineError: out of memory"):
        run.send(reply)
    assert process.receive(in_a_minute()) is None
    assert process.receive(in_a_minute()) == STEP
    with pytest.raises(TrialError, match=r"EngineError: out of memory\. Its log is .*trial\.log"):
        process.receive(in_a_minute())


def test_a_run_that_ends_is_an_error_with_the_end_of_its_log(start: Start) -> None:
    process, run = start("print('Killed by the kernel'); raise SystemExit(3)")
    run.close()
    with pytest.raises(TrialError, match=r"exit status 3\)[\s\S]*Killed by the kernel"):
        process.receive(in_a_minute())


def test_a_run_that_takes_too_long_is_an_error_and_is_ended(start: Start) -> None:
    process, _ = start(ENDLESS)
    with pytest.raises(TrialError, match="it took too long"):
        process.receive(time.monotonic())
    process.kill()
    assert process.child.exit_code() is not None
