"""Runs a program in a container with this process's standard streams, as if it were a child of it.

Started as ``python -I -S attached_process.py REQUEST`` with a `Request` as JSON. It ends when the program has ended; if its own
standard input ends, so does that of the program; if it is stopped, the program is killed with all that it has started.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypedDict

    from agentrl.containers.exec_process import Daemon, kill_processes

    class Request(TypedDict):
        """What to run."""

        daemon: str
        """Address of the daemon."""
        version: str
        """Version of its API."""
        container: str
        """The container's id."""
        marker: str
        """Value of `agentrl.containers.exec_process.MARKER` in its environment."""
        exec: dict[str, object]
        """Body of the request that creates it at the daemon."""

else:  # the package, which takes long to import, is not on the path
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    from exec_process import Daemon, kill_processes

LINE_BYTES = 2**24
"""Largest size of a line of output. The program's machine is not trusted to end its lines."""
CHUNK = 2**16


def main() -> int:
    """Run the program of the request in the first argument, and return the exit status of this process."""
    request: Request = json.loads(sys.argv[1])
    daemon = Daemon(request["daemon"], request["version"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    exec_id = daemon.create_exec(request["container"], request["exec"])
    connection, first = daemon.stream(f"/exec/{exec_id}/start", {"Detach": False, "Tty": False})
    connection.settimeout(None)
    threading.Thread(target=_send_input, args=(connection,), daemon=True).start()
    try:
        line_bytes = 0
        for kind, chunk in _frames(connection, first):
            _write(2 if kind == 2 else 1, chunk)
            if kind != 2:
                line_bytes = len(chunk) - 1 - chunk.rfind(b"\n") if b"\n" in chunk else line_bytes + len(chunk)
            if line_bytes > LINE_BYTES:
                _write(2, b"a line of the program is too long\n")
                return 1
        return 0
    except BrokenPipeError:
        return 0
    finally:
        kill_processes(daemon, request["container"], request["marker"])


def _send_input(connection: socket.socket) -> None:
    try:
        while data := os.read(0, CHUNK):
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        return  # the program has ended


def _frames(connection: socket.socket, first: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the pieces of the daemon's stream, which has a header of 8 bytes before each: 1 is output, 2 errors."""
    buffer = bytearray(first)
    while True:
        while len(buffer) >= 8 and len(buffer) - 8 >= (length := int.from_bytes(buffer[4:8], "big")):
            kind, chunk = buffer[0], bytes(buffer[8 : 8 + length])
            del buffer[: 8 + length]
            yield kind, chunk
        try:
            data = connection.recv(CHUNK)
        except OSError:
            return
        if not data:
            return
        buffer += data


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # the thread that reads input may wait
