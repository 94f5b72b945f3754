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
from collections.abc import Callable, Iterator

import psutil

SERVERS = ("gcs_server", "raylet")
"""Ray's processes without which it does not work."""
_LOOK_S = 0.1
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
    """Kill the raylets that ``process`` has started, and their children."""
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
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _watch(process: psutil.Process) -> None:
    """Watch until the standard input ends, as it does with the process or with its context; a line says that Ray has started."""
    processes: set[psutil.Process] = set()
    try:
        while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
            processes |= _raylet_processes(process)
            if "gcs_server" in ended_servers(process) and not select.select([sys.stdin], [], [], _GRACE_S)[0]:
                sys.stderr.write("LearnerError: Ray does not start: its process gcs_server has ended\n")
                return
        if os.read(sys.stdin.fileno(), 1):
            processes |= _raylet_processes(process)
            os.read(sys.stdin.fileno(), 1)
    finally:
        _kill(processes)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other signals that end a run are blocked, as in Ray's processes
    with contextlib.suppress(psutil.NoSuchProcess):
        _watch(psutil.Process(int(sys.argv[1])))
