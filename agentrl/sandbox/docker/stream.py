"""The stream of an attached container: standard input in one direction, output and error output in the other."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from typing import Any, Final

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
