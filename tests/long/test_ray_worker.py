"""A worker process of Ray that is killed before it has registered is replaced, and the start of the ranks goes on."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

START = """
import threading, time
import psutil, ray
from agentrl.cluster.ray_runtime import RayRuntime

def kill_first(killed):
    while not killed:
        for process in psutil.Process().children(recursive=True):
            try:
                starting = "default_worker.py" in " ".join(process.cmdline()[1:3])
            except psutil.Error:
                continue
            if starting:
                process.kill()
                killed.append(process.pid)
                break
        time.sleep(0.01)

killed = []
threading.Thread(target=kill_first, args=(killed,), daemon=True).start()
runtime = RayRuntime(cpus=1)
runtime.start()

@ray.remote(num_cpus=1)
class Answer:
    def answer(self):
        return 42

assert ray.get(Answer.remote().answer.remote(), timeout=180) == 42
assert killed
runtime.stop()
"""


def test_a_worker_killed_before_it_registers_is_replaced() -> None:
    """Ray notices after the minute in which a worker has to register."""
    done = subprocess.run(
        [sys.executable, "-c", START],
        stderr=subprocess.PIPE,
        text=True,
        timeout=240,
        check=False,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stderr
