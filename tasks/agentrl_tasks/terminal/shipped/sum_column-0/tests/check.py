"""Exits with 0 if the exercise is solved."""

import os
import signal
import stat
import subprocess
import sys

WORK = "/work"
LONGEST = 1 << 20


def text(name):
    """Return the text of a file in the working folder; None if there is none, or no ordinary one."""
    try:
        file = os.open(os.path.join(WORK, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(file, "rb") as opened:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return None
        return opened.read(LONGEST).decode("utf-8", "replace")


def start(*words):
    """Start a program of the working folder as nobody."""
    return subprocess.Popen(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *words],
        cwd=WORK, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
    )


def stop(process):
    """Kill a program with all that it has started in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.stdout.close()
    process.wait()


def output(*words):
    """Return what a program prints within ten seconds; None if it fails."""
    process = start(*words)
    try:
        printed, _ = process.communicate(timeout=10)
        return printed[:LONGEST].decode("utf-8", "replace") if process.returncode == 0 else None
    except subprocess.TimeoutExpired:
        return None
    finally:
        stop(process)


def solved():
    return (text("answer.txt") or "").strip() == '344'

sys.exit(0 if solved() else 1)
