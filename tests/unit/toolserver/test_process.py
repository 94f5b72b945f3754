"""A child ends when told, and when its parent dies by SIGKILL."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import wait_for_exit, wait_until

from agentrl.core.child_process import ChildProcess, reserve_port
from agentrl.core.errors import PortInUseError, ToolServerError

SLEEPER = "from agentrl.core.child_process import exit_with_parent; exit_with_parent(); import time; time.sleep(60)"

MAIN_OF_WORKERS = """
import multiprocessing, os
from agentrl.core.child_process import exit_with_main_process

def work(results):
    exit_with_main_process()
    results.put(bytes(2**20))  # more than a pipe takes: at its end the worker waits for a reader

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    results = context.Queue()
    worker = context.Process(target=work, args=(results,))
    worker.start()
    print(worker.pid, flush=True)
    os._exit(0)
"""


def start(code: str, folder: Path) -> ChildProcess:
    return ChildProcess.start([sys.executable, "-c", code], log=folder / "log.txt", name="child", error=ToolServerError)


def test_stop_ends_the_whole_group(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid, flush=True)\n"
        "time.sleep(60)"
    )
    child = start(code, tmp_path)
    wait_until(lambda: child.log_tail().strip() or not child.alive())
    grandchild = int(child.log_tail())
    assert child.alive()
    child.stop()
    child.stop()
    assert not child.alive()
    assert child.exit_code() == -signal.SIGTERM
    wait_for_exit(grandchild, 10)


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('on', flush=True)\ntime.sleep(60)"
    with start(code, tmp_path) as child:
        wait_until(lambda: "on" in child.log_tail() or not child.alive())
        child.stop(timeout_s=0.2)
        assert child.exit_code() == -signal.SIGKILL


def test_a_child_that_dies_at_once_is_told_with_its_last_words(tmp_path: Path) -> None:
    with (
        reserve_port() as port,
        start("import sys; print('no such corpus'); sys.exit(2)", tmp_path) as child,
        pytest.raises(ToolServerError, match=r"(?s)exit status 2.*no such corpus"),
    ):
        child.wait_healthy(f"http://127.0.0.1:{port}/health", timeout_s=20)


def test_a_child_that_stays_silent_is_stopped(tmp_path: Path) -> None:
    with reserve_port() as port, start(SLEEPER, tmp_path) as child:
        with pytest.raises(ToolServerError, match=r"does not answer at .* after 0\.2 s"):
            child.wait_healthy(f"http://127.0.0.1:{port}/health", timeout_s=0.2)
        assert not child.alive()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a server have a port that is held for it")
def test_a_reserved_port_is_for_the_server_that_names_it() -> None:
    with reserve_port() as port, socket.socket() as thief, socket.socket() as server:
        with pytest.raises(OSError, match="in use"):
            thief.bind(("127.0.0.1", port))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        with (
            pytest.raises(PortInUseError, match=rf"some\.port={port} .*set some\.port"),
            reserve_port(port=port, key="some.port"),
        ):
            pass
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass


def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ToolServerError, match="child does not start"):
        ChildProcess.start(["/no/such/program"], log=tmp_path / "log", name="child", error=ToolServerError)


def test_the_child_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent_code = (
        "import pathlib, sys, time\n"
        "from agentrl.core.child_process import ChildProcess\n"
        f"child = ChildProcess.start([sys.executable, '-c', {SLEEPER!r}], log=pathlib.Path({str(tmp_path / 'log')!r}), "
        "name='child')\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    os.kill(pid, 0)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for_exit(pid, 10)


LIMITS = """
import resource
from agentrl.core.child_process import raise_file_limit

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
most = min(hard, 65536) if hard > 0 else 65536
for soft, expected in ((100, most), (hard, hard)):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    raise_file_limit()
    print(resource.getrlimit(resource.RLIMIT_NOFILE) == (expected, hard))
"""


def test_the_file_limit_is_raised_and_never_lowered() -> None:
    completed = subprocess.run([sys.executable, "-c", LIMITS], capture_output=True, text=True, check=True)
    assert completed.stdout.split() == ["True", "True"]


def test_a_worker_whose_result_is_never_read_ends_with_the_main_process(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(MAIN_OF_WORKERS)
    worker = int(subprocess.run([sys.executable, script], stdout=subprocess.PIPE, check=True, timeout=30).stdout)
    try:
        wait_for_exit(worker, 10)
    except AssertionError:
        os.kill(worker, signal.SIGKILL)
        raise
