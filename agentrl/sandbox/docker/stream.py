"""The stream of a container that one is attached to: its standard input one way, output and error output the other."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from typing import Any, Final

from agentrl.sandbox.runner_link import ByteReader

HEADER: Final = struct.Struct(">BxxxI")
"""Before every piece: 1 for output or 2 for error output, and the piece's length in bytes."""
STDOUT, STDERR = 1, 2
WORDS_BYTES = 2048


class ContainerReader:
    """Reads what a container prints, and keeps the end of what it says on its error output in ``words``."""

    def __init__(self, reader: ByteReader) -> None:
        self._reader = reader
        self._output = bytearray()
        self.words = b""

    async def readexactly(self, n: int) -> bytes:
        """Return n bytes of output; see `ByteReader`.

        Raises:
            ValueError: the stream has no such form.

        """
        while len(self._output) < n:
            kind, length = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            piece = await self._reader.readexactly(length)
            if kind == STDOUT:
                self._output += piece
            elif kind == STDERR:
                self.words = (self.words + piece)[-WORDS_BYTES:]
            else:
                raise ValueError(f"a container's stream has no kind {kind}")
        taken = bytes(self._output[:n])
        del self._output[:n]
        return taken


def attach(api: Any, container: str) -> socket.socket:
    """Attach to a container that was created and not started yet; return the socket, which is ours alone.

    The SDK's object shares its socket with a response that closes it whenever it pleases, or not at all.
    """
    raw = api.attach_socket(container, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
    shared = raw._sock
    own = socket.socket(fileno=os.dup(shared.fileno()))
    raw.close()
    shared.close()
    own.setblocking(False)
    return own


class _Protocol(asyncio.StreamReaderProtocol):
    """Ends both directions with the container's output: nobody would read what is still being sent to it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._both = transport
        super().connection_made(transport)

    def eof_received(self) -> bool:
        """Let whoever waits to send go on, and find out."""
        super().eof_received()
        self._both.abort()
        return False


async def open_stream(sock: socket.socket) -> tuple[ContainerReader, asyncio.StreamWriter]:
    """Return both directions of an attached socket, and own it from now on."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**20)
    # Sockets of the Unix kind too, as long as they are connected.
    transport, protocol = await loop.create_connection(lambda: _Protocol(reader), sock=sock)
    return ContainerReader(reader), asyncio.StreamWriter(transport, protocol, reader, loop)
