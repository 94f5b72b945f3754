"""Ray ends with the process that starts it, and a start of Ray whose GCS is killed ends.

Each start is a process: one that hangs lets no thread of it run.
"""

import contextlib
import os
from pathlib import Path

import preloaded
import psutil
import pytest
from command_words import command_words
from deadlines import wait_until
from shared_runs import environment

pytestmark = pytest.mark.slow

LIMIT_S = 90
"""Much less than the ten minutes that Ray waits, and enough for a start on a busy machine."""
GONE_S = 5
"""Much less than the 20 seconds and more in which Ray's agents notice that their raylet has ended."""


@pytest.mark.long
@pytest.mark.parametrize("moment", ["raylet", "driver"])
def test_a_start_whose_gcs_is_killed_ends(tmp_path: Path, moment: str) -> None:
    """Before the raylet starts; and before the driver connects, which then waits without letting another thread run."""
    killed = tmp_path / "killed"
    process, errors = start("kill_gcs", moment, killed)
    try:
        code = process.wait(LIMIT_S)
    finally:
        process.kill()
    assert killed.exists()
    assert code == 1, errors.read_text()
    assert "LearnerError: Ray does not start: its process gcs_server has ended" in errors.read_text()
    wait_until(lambda: not of_session(process.pid), GONE_S)


@pytest.mark.parametrize("moment", [pytest.param("starting", marks=pytest.mark.long), "worker"])
def test_nothing_of_ray_outlives_the_process_that_started_it(tmp_path: Path, moment: str) -> None:
    """It is killed while Ray starts, or once Ray has a worker."""
    ready = tmp_path / "ready"
    process, _ = start("wait_with_ray", moment, ready)
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None, LIMIT_S)
        wait_until(lambda: any("Agent" in "".join(command_words(child)[:1]) for child in of_session(process.pid)))
        children = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
    process.wait()
    wait_until(lambda: not of_session(process.pid), GONE_S)
    assert psutil.wait_procs(children, timeout=GONE_S)[1] == []


def start(function: str, moment: str, file: Path) -> tuple[preloaded.Forked, Path]:
    """Start a process in a session of its own; returns it and the file of its errors."""
    errors = file.with_name("errors.txt")
    with errors.open("wb") as output:
        descriptors = {1: output.fileno(), 2: output.fileno()}
        words = (moment, str(file))
        request = preloaded.Request(f"ray_starts:{function}", words, str(file.parent), environment(), descriptors)
        return preloaded.Forked(request), errors


def of_session(leader: int) -> list[psutil.Process]:
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) == leader:
                processes.append(process)
    return processes
