"""Ray ends with the process that starts it, and a start of Ray whose GCS is killed ends.

Each start is a process: one that hangs lets no thread of it run.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from command_words import command_words
from deadlines import wait_until

START = """
import sys
from pathlib import Path
import psutil, ray
from agentrl.cluster.ray_runtime import RayRuntime
from agentrl.core.errors import LearnerError

def killing(start):
    def killed(*arguments, **options):
        [gcs] = [child for child in psutil.Process().children() if child.name() == "gcs_server"]
        gcs.kill()
        Path(sys.argv[2]).touch()
        return start(*arguments, **options)
    return killed

owner = {"raylet": ray._private.node.Node, "driver": ray._raylet}[sys.argv[1]]
name = {"raylet": "start_raylet", "driver": "CoreWorker"}[sys.argv[1]]
setattr(owner, name, killing(getattr(owner, name)))
try:
    RayRuntime(cpus=1).start()
except LearnerError as error:
    sys.exit(f"LearnerError: {error}")
"""
ENDING = """
import sys, threading
from pathlib import Path
from agentrl.cluster.ray_runtime import RayRuntime
import ray

def wait(*_, **__):
    Path(sys.argv[2]).touch()
    threading.Event().wait()

if sys.argv[1] == "starting":  # its raylet has started its agents, and the driver does not connect
    ray._raylet.CoreWorker = wait
RayRuntime(cpus=1).start()
ray.get(ray.remote(lambda: 1).remote())
wait()
"""
LIMIT_S = 90
"""Much less than the ten minutes that Ray waits, and enough for a start on a busy machine."""
GONE_S = 5
"""Much less than the 20 seconds and more in which Ray's agents notice that their raylet has ended."""


@pytest.mark.parametrize("moment", ["raylet", "driver"])
def test_a_start_whose_gcs_is_killed_ends(tmp_path: Path, moment: str) -> None:
    """Before the raylet starts; and before the driver connects, which then waits without letting another thread run."""
    killed = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, "-c", START, moment, str(killed)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, error = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert killed.exists()
    assert process.returncode == 1, error
    assert "LearnerError: Ray does not start: its process gcs_server has ended" in error
    wait_until(lambda: not of_session(process.pid), GONE_S)


@pytest.mark.parametrize("moment", ["starting", "worker"])
def test_nothing_of_ray_outlives_the_process_that_started_it(tmp_path: Path, moment: str) -> None:
    """It is killed while Ray starts, or once Ray has a worker."""
    ready = tmp_path / "ready"
    process = subprocess.Popen([sys.executable, "-c", ENDING, moment, str(ready)], start_new_session=True)
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None, LIMIT_S)
        wait_until(lambda: any("Agent" in "".join(command_words(child)[:1]) for child in of_session(process.pid)))
        children = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
    process.wait()
    wait_until(lambda: not of_session(process.pid), GONE_S)
    assert psutil.wait_procs(children, timeout=GONE_S)[1] == []


def of_session(leader: int) -> list[psutil.Process]:
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) == leader:
                processes.append(process)
    return processes
