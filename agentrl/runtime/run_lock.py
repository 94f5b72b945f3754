"""The lock on a run's folder, which keeps a second process out of it."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.core.atomic_files import names_file
from agentrl.core.errors import ConfigError

LOCK = "lock"
"""File in the run's folder that the running process has locked; it names the process."""
_HOLDER = re.compile(r"process (\d+) on (\S+) since (.+)")


@dataclass(frozen=True, slots=True)
class LockHolder:
    """The process that has locked a run's folder, or had."""

    pid: int
    host: str
    since: str
    """Local time of its machine."""
    alive: bool
    """Whether it holds the lock. False for a process of another machine, if the file system has no locks between machines."""

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this machine."""
        return self.host == socket.gethostname()


def lock_holder(folder: Path) -> LockHolder | None:
    """Return the process that locked a folder last, or None if none did."""
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return None
    with os.fdopen(handle, encoding="utf-8") as file:
        match = _HOLDER.fullmatch(file.read().strip())
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            alive = False
        except OSError:
            alive = True
    return None if match is None else LockHolder(int(match[1]), match[2], match[3], alive)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the folder of a run, and lock it for this process. The kernel releases the lock when the process ends.

    Raises:
        ConfigError: another process has locked it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"run.dir={folder} cannot be written: {error.strerror or error}") from None
    with os.fdopen(handle, "r+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"run.dir={folder} is in use by {file.read().strip()}; set another run.dir") from None
        except OSError as error:
            raise ConfigError(
                f"run.dir={folder} cannot be locked: {error.strerror or error}; set run.dir to a file system with locks"
            ) from None
        with names_file(folder / LOCK):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
            file.flush()
        yield
