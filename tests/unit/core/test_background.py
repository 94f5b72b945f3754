"""Threads in which code of users runs, which may never return."""

import os
import subprocess
import sys
import threading

import pytest

from agentrl.core.background import DaemonThreads

STUCK = """
import threading
from agentrl.core.background import DaemonThreads

DaemonThreads("env").submit(threading.Event().wait)
"""


def test_a_stuck_call_does_not_keep_the_process_from_ending() -> None:
    subprocess.run([sys.executable, "-c", STUCK], env=dict(os.environ), timeout=60, check=True)


def test_calls_run_at_the_same_time_and_threads_are_used_again() -> None:
    threads = DaemonThreads("numbers")
    barrier = threading.Barrier(3)
    numbers = [threads.submit(barrier.wait) for _ in range(3)]
    assert sorted(number.result(10) for number in numbers) == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 1, 0).result(10)
    running = [thread for thread in threading.enumerate() if thread.name == "numbers"]
    assert 3 <= len(running) <= 4
    threads.shutdown()
    for thread in running:
        thread.join(10)
        assert not thread.is_alive()
