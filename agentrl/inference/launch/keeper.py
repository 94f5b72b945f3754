"""``python -m agentrl.inference.launch.keeper FOLDER LOG COMMAND…``: the process that holds a kept engine, and ends it.

It leaves the process that started it, and its session: Ray ends the children of a run's processes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import time
from pathlib import Path

from agentrl.core.atomic_files import write_atomically
from agentrl.core.child_process import ChildProcess
from agentrl.inference.launch.kept_engines import EXIT, KEEPER, LOCK, PID, UNTIL, try_lock

_POLL_S = 0.5


def main() -> None:
    """Start the engine, and wait for its end."""
    folder, log, *command = sys.argv[1:]
    if os.fork():
        os._exit(0)
    os.setsid()
    keep(Path(folder), Path(log), command)


def keep(folder: Path, log: Path, command: list[str]) -> None:
    """Hold an engine until it ends by itself, is not taken for too long, or its run ends without releasing it."""
    with (folder / KEEPER).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with ChildProcess.start(command, log=log, name="the engine") as child:
            _write(folder / PID, child.pid)
            while child.alive() and not _is_due(folder):
                time.sleep(_POLL_S)
            code = child.exit_code()
            _write(folder / EXIT, -9 if code is None else code)  # while its process id is not used again
        while folder.exists() and try_lock(folder / LOCK) is None:
            time.sleep(_POLL_S)  # its run still reads why it has ended
        shutil.rmtree(folder, ignore_errors=True)


def _is_due(folder: Path) -> bool:
    lock = try_lock(folder / LOCK)
    if lock is None:
        return not folder.exists()
    try:
        until = float((folder / UNTIL).read_text()) if (folder / UNTIL).exists() else 0.0
        return time.time() > until
    finally:
        os.close(lock)


def _write(file: Path, number: int) -> None:
    with write_atomically(file) as partial:
        partial.write_text(str(number))


if __name__ == "__main__":
    main()
