"""What a container reports: its stream, and its processes that the kernel has killed for lack of memory.

The stream of an attached container is standard input in one direction, output and error output in the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from agentrl.sandbox.cgroup import Mounts, parse_count, parse_mounts
from agentrl.sandbox.runner_sandbox import ByteReader

HEADER: Final = struct.Struct(">BxxxI")
"""Before every chunk: 1 for output or 2 for error output, and the chunk's length in bytes."""
STDOUT, STDERR = 1, 2
STDERR_BYTES = 2048
"""Bytes of error output that are kept."""


class ContainerReader:
    """Reads a container's output, and keeps the end of its error output in ``stderr``."""

    def __init__(self, reader: ByteReader) -> None:
        self._reader = reader
        self._output = bytearray()
        self.stderr = b""

    async def readexactly(self, n: int) -> bytes:
        """Return n bytes of output; see `ByteReader`.

        Raises:
            ValueError: the stream does not have this format.
        """
        while len(self._output) < n:
            kind, length = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            chunk = await self._reader.readexactly(length)
            if kind == STDOUT:
                self._output += chunk
            elif kind == STDERR:
                self.stderr = (self.stderr + chunk)[-STDERR_BYTES:]
            else:
                raise ValueError(f"a container's stream has no kind {kind}")
        output = bytes(self._output[:n])
        del self._output[:n]
        return output


def attach(api: Any, container: str) -> socket.socket:
    """Attach to a container that was created and not started yet; return a socket that only the caller holds.

    The SDK's object shares its socket with a response, which may close it at any time or never.
    """
    raw = api.attach_socket(container, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
    shared = raw._sock
    duplicate = socket.socket(fileno=os.dup(shared.fileno()))
    raw.close()
    shared.close()
    duplicate.setblocking(False)
    return duplicate


class _Protocol(asyncio.StreamReaderProtocol):
    """Ends both directions with the container's output: no process is left to read its input."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, to abort it at the end of the output."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._both = transport
        super().connection_made(transport)

    def eof_received(self) -> bool:
        """Abort the transport, so that a pending write ends too."""
        super().eof_received()
        self._both.abort()
        return False


async def open_stream(sock: socket.socket) -> tuple[ContainerReader, asyncio.StreamWriter]:
    """Return both directions of an attached socket, and take ownership of it."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**20)
    # Works for connected Unix sockets too.
    transport, protocol = await loop.create_connection(lambda: _Protocol(reader), sock=sock)
    return ContainerReader(reader), asyncio.StreamWriter(transport, protocol, reader, loop)


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
