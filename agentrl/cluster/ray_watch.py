"""A process that ends the Ray that this one starts: with this process, whatever ends it, and if its GCS ends while Ray starts.

If this process is killed, the kernel kills raylet and GCS, and workers end with their raylet. Ray's agents look for it only
every 20 seconds or so: the watch kills them at once.

While `ray.init` connects, it waits for the GCS and holds Python's global lock: no thread of the process runs until Ray's time
limit has passed. If the raylet ends, so does the wait: Ray then ends the process with status 1.

Run as a program, this module watches the process with the id of its argument.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil

SERVERS = ("gcs_server", "raylet")
"""Ray's processes without which it does not work."""
_RAYLET_VARIABLE = "RAY_RAYLET_PID"
"""Environment variable in which agents and workers have the process id of their raylet."""
_LOOK_S = 0.1
_AGENTS_S = 30.0
"""Time after the start of Ray in which its agents may start."""
_LATER_LOOK_S = 0.5
_PAUSES_S = (0.3, 0.7, 1.0)
"""Between the looks for processes of a killed process's Ray: a raylet may have been starting one as it ended."""
_GRACE_S = 3.0
"""Seconds from the end of the GCS in which the process may still raise an error itself."""


@contextlib.contextmanager
def watch_ray() -> Iterator[Callable[[], None]]:
    """Kill what is left of the Ray that is started in this context at its end, and at the end of this process.

    If the GCS ends and blocks this process, it is ended with status 1 and a message.

    Yields:
        a function to call once Ray has started.
    """
    # Not `-m agentrl...`: that would import the package in each start, a second of a core. `-P`: no module of this folder
    # stands for another one.
    command = [sys.executable, "-P", __file__, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True) as watch:
        assert watch.stdin is not None
        pipe = watch.stdin

        def report_start() -> None:
            pipe.write(b"\n")

        try:
            yield report_start
        finally:
            pipe.close()


def ended_servers(process: psutil.Process) -> list[str]:
    """Return the names of Ray's processes that ``process`` has started, and that have ended."""
    names = []
    for child in process.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_ZOMBIE and child.name() in SERVERS:
                names.append(child.name())
    return names


def kill_raylets(process: psutil.Process) -> None:
    """Kill the raylets that ``process`` has started, with their agents and workers."""
    _kill(_raylet_processes(process))


def _raylet_processes(process: psutil.Process) -> set[psutil.Process]:
    """Return the raylets that ``process`` has started, with their agents and workers."""
    processes: set[psutil.Process] = set()
    for child in process.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == "raylet":
                processes.update([child, *child.children(recursive=True)])
    return processes


def _kill(processes: set[psutil.Process]) -> None:
    """Kill processes, and those whose environment names one of them as their raylet.

    An agent or a worker has this environment until it has named itself, a second after its start.
    """
    names = {str(process.pid) for process in processes}
    for process in psutil.process_iter() if processes else ():
        with contextlib.suppress(psutil.Error):
            if process in processes or process.environ().get(_RAYLET_VARIABLE) in names:
                process.kill()


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _watch(process: psutil.Process) -> None:
    """Watch until the standard input ends, as it does with the process or with its context; a line says that Ray has started."""
    processes: set[psutil.Process] = set()
    try:
        while not _readable(_LOOK_S):
            processes |= _raylet_processes(process)
            if "gcs_server" in ended_servers(process) and not _readable(_GRACE_S):
                sys.stderr.write("LearnerError: Ray does not start: its process gcs_server has ended\n")
                return
        if os.read(sys.stdin.fileno(), 1):
            begun = time.monotonic()
            processes |= _raylet_processes(process)
            while not _readable(_LATER_LOOK_S if time.monotonic() < begun + _AGENTS_S else None):
                processes |= _raylet_processes(process)
    finally:
        _kill(processes)
        for pause_s in () if _lives(process) else _PAUSES_S:
            time.sleep(pause_s)
            _kill(processes)


def _readable(timeout_s: float | None) -> bool:
    """Return whether the standard input has a line or ends within a time."""
    return bool(select.select([sys.stdin], [], [], timeout_s)[0])


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other signals that end a run are blocked, as in Ray's processes
    with contextlib.suppress(psutil.NoSuchProcess):
        _watch(psutil.Process(int(sys.argv[1])))
