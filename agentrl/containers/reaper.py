"""The reaper: a process that outlives the run, and removes what is past its time at one daemon.

It ends when nothing with a lease is left there. One runs for every daemon and ``state`` folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import docker

from agentrl.containers.daemon import FAULTS, REQUEST_TIMEOUT_S
from agentrl.containers.leases import Remains, daemon_time, reap

_log = logging.getLogger(__name__)

FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 30.0
WAKE = signal.SIGUSR1
LOST_S = 3600.0
"""Time after which it gives up a daemon that does not answer; the next run there starts another one."""


def ensure_reaper(url: str, state: Path) -> None:
    """Start a reaper for a daemon unless one runs. The caller has written its lease already, which keeps the reaper running."""
    file = _lock_file(url, state)
    file.parent.mkdir(parents=True, exist_ok=True)
    if _is_running(file):
        return
    command = [sys.executable, "-m", "agentrl.containers.reaper", url, str(state)]
    with file.with_suffix(".log").open("ab") as log:
        # By a shell that ends: this process is not its parent, which would have to wait for it.
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env=_environment(),
            check=True,
        )


def wake_reaper(url: str, state: Path) -> None:
    """Let a daemon's reaper look at once: it ends if nothing is left."""
    file = _lock_file(url, state)
    if file.exists() and _is_running(file):
        with suppress(ValueError, OSError):
            process = int(file.read_text())
            if b"agentrl.containers.reaper" in Path(f"/proc/{process}/cmdline").read_bytes():
                os.kill(process, WAKE)


def _is_running(lock_file: Path) -> bool:
    with lock_file.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _environment() -> dict[str, str]:
    package_folder = str(Path(__file__).parents[2])
    return {"PATH": "/usr/bin:/bin", "PYTHONPATH": package_folder, "OMP_NUM_THREADS": "1"}


def _lock_file(url: str, state: Path) -> Path:
    return state / f"reaper-{hashlib.sha256(url.encode()).hexdigest()[:12]}.lock"


def run(url: str, state: Path) -> None:
    """Remove what is past its time until nothing is left."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {WAKE})
    handler = logging.FileHandler(_lock_file(url, state).with_suffix(".log"))
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    with _lock_file(url, state).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        lost_since: float | None = None
        while True:
            try:
                api = docker.APIClient(base_url=url, version="auto", timeout=REQUEST_TIMEOUT_S)
                try:
                    remains, daemon_now = reap(api), daemon_time(api.info())
                    _report(remains)
                    if remains.next_end is None:
                        # A run that saw the lock before it is released has written its lease, which is seen after that.
                        fcntl.flock(lock, fcntl.LOCK_UN)
                        if reap(api).next_end is None:
                            return
                        try:
                            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        except BlockingIOError:
                            return
                        continue
                    lost_since = None
                    pause_s = remains.next_end - daemon_now + 0.1
                finally:
                    api.close()
            except FAULTS as error:
                lost_since = lost_since or time.monotonic()
                pause_s = LAST_PAUSE_S
                _log.warning("%s: %s", url, error)
                if time.monotonic() - lost_since > LOST_S or not _has_folder(url):
                    return
            signal.sigtimedwait({WAKE}, min(max(pause_s, FIRST_PAUSE_S), LAST_PAUSE_S))


def _has_folder(url: str) -> bool:
    """Return whether the folder of a daemon's socket is still there: that of a daemon for a while goes with it."""
    return not url.startswith("unix://") or Path(url.removeprefix("unix://")).parent.is_dir()


def _report(remains: Remains) -> None:
    if remains.removed:
        _log.info("removed %s", ", ".join(remains.removed))
    for line in remains.refused:
        _log.warning("not removed: %s", line)


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]))
