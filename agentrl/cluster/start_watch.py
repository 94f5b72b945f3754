"""A process that ends the wait of this one for a Ray whose GCS has ended.

While `ray.init` connects, it waits for the GCS and holds Python's global lock: no thread of the process runs until Ray's time
limit has passed. If the raylet ends, so does the wait: Ray then ends the process with status 1. Run as a program, this module
kills the raylet that the process with the id of its argument has started, with its agents, once its GCS has ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator

import psutil

SERVERS = ("gcs_server", "raylet")
"""Ray's processes without which it does not work."""
_LOOK_S = 0.5
_GRACE_S = 3.0
"""Seconds from the end of the GCS in which the process may still raise an error itself."""


@contextlib.contextmanager
def ended_without_gcs() -> Iterator[None]:
    """End this process, with status 1 and a message, if the GCS that it starts in this context ends and blocks it."""
    # Not `-m agentrl...`: that would import the package in each start, a second of a core. `-P`: no module of this folder
    # stands for another one.
    command = [sys.executable, "-P", __file__, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as watch:
        assert watch.stdin is not None
        try:
            yield
        finally:
            watch.stdin.close()


def ended_servers(process: psutil.Process) -> list[str]:
    """Return the names of Ray's processes that ``process`` has started, and that have ended."""
    names = []
    for child in process.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_ZOMBIE and child.name() in SERVERS:
                names.append(child.name())
    return names


def find_raylets(process: psutil.Process) -> list[psutil.Process]:
    """Return the raylets that ``process`` has started."""
    raylets = []
    for child in process.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == "raylet":
                raylets.append(child)
    return raylets


def find_agents(process: psutil.Process) -> list[psutil.Process]:
    """Return the children of the raylets of ``process``. Without a GCS, Ray's agents outlive their raylet by a minute."""
    agents: list[psutil.Process] = []
    for raylet in find_raylets(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            agents += raylet.children(recursive=True)
    return agents


def kill_raylets(process: psutil.Process) -> None:
    """Kill the raylets that ``process`` has started, and their children."""
    for child in [*find_raylets(process), *find_agents(process)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def _watch(process: psutil.Process) -> None:
    """Watch until the standard input ends, as it does with the process or with its context."""
    while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
        if "gcs_server" in ended_servers(process) and not select.select([sys.stdin], [], [], _GRACE_S)[0]:
            sys.stderr.write("LearnerError: Ray does not start: its process gcs_server has ended\n")
            kill_raylets(process)
            return


if __name__ == "__main__":
    with contextlib.suppress(psutil.NoSuchProcess):
        _watch(psutil.Process(int(sys.argv[1])))
