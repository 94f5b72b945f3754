"""Count of a container's processes that the kernel has killed for lack of memory, its first process included."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from agentrl.sandbox.cgroup import Mounts, parse_count, parse_mounts


class MemoryKills:
    """Counts as the kernel does: the daemon reports lack of memory late, and on cgroup v1 several times for one kill.

    The kernel's count is in the container's cgroup, which the daemon removes within milliseconds of the container's end. So it
    is read a last time when the kernel reports the end of the first process. Where that is too late, the daemon's reports
    count only if the kernel has killed a process on this machine meanwhile.

    Args:
        container: its id.
        pid: its first process, as the daemon knows it.
    """

    def __init__(self, container: str, pid: int) -> None:
        self.file = _oom_file(container, pid)
        """The kernel's count, in the container's cgroup; None if the container is on another machine."""
        self._pid = pid
        self._count = 0
        self._machine_count = 0
        """At the container's last kill."""
        self._is_last = False
        """Whether the cgroup was read after the end of the first process."""
        self._process: int | None = None

    def watch(self) -> None:
        """Begin to wait for the end of the first process."""
        if self.file is not None:
            with contextlib.suppress(OSError):  # it has ended
                self._process = os.pidfd_open(self._pid)
                asyncio.get_running_loop().add_reader(self._process, self._on_process_end)

    def close(self) -> None:
        """End the waiting."""
        if self._process is not None:
            asyncio.get_running_loop().remove_reader(self._process)
            os.close(self._process)
            self._process = None

    def count(self) -> int:
        """Return the number of kills so far.

        It is 0 if the daemon is on another machine: a single process killed for lack of memory looks like any other there
        that got SIGKILL.
        """
        self._read()
        return self._count

    async def count_end(self, oom_killed: bool, reports: Callable[[], Awaitable[int]]) -> None:
        """Count the end of the whole container, if that was for lack of memory and the cgroup was gone too early.

        Args:
            oom_killed: whether the daemon has reported lack of memory in the container, at its end or before.
            reports: returns how often it has.
        """
        if self._is_last or not oom_killed:
            return
        killed = not self._count
        if not killed and machine_oom_kills() > self._machine_count:
            killed = await reports() > self._count
        self._is_last = True
        self._count += killed

    def _on_process_end(self) -> None:
        self._is_last = self._read()
        self.close()

    def _read(self) -> bool:
        """Read the cgroup's count; return False if there is none, or none any more."""
        if self.file is None:
            return False
        try:
            count = parse_count(self.file.read_text(), "oom_kill")
        except OSError:
            return False
        if count > self._count:
            self._count, self._machine_count = count, machine_oom_kills()
        return True


def machine_oom_kills() -> int:
    """Return how many processes of this machine the kernel has killed for lack of memory."""
    return parse_count(Path("/proc/vmstat").read_text(), "oom_kill")


def _oom_file(container: str, pid: int) -> Path | None:
    """Return the file that counts memory kills in a container; None if the container is on another machine."""
    try:
        groups = Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return None
    return oom_file(groups, parse_mounts(Path("/proc/self/mounts").read_text()), container)


def oom_file(groups: str, mounts: Mounts, container: str) -> Path | None:
    """Return the file that counts memory kills, by the cgroups of a container's first process.

    Args:
        groups: content of its ``/proc/PID/cgroup``.
        mounts: where cgroups are mounted.
        container: its id, which is part of its cgroup's name. If it is not, the container is on another machine, and the
            process id belongs to another process here.
    """
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if container not in path:
            continue
        if "memory" in controllers.split(",") and "memory" in mounts.v1:
            return mounts.v1["memory"] / path.strip("/") / "memory.oom_control"
        if not controllers and mounts.v2 is not None and "memory" not in mounts.v1:
            return mounts.v2 / path.strip("/") / "memory.events"
    return None
