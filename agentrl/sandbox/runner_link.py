"""Frames to and from the runner in a sandbox: four bytes of length, then a JSON object with the request's id."""

from __future__ import annotations

import asyncio
import io
import json
import struct
from collections.abc import Mapping
from typing import Any, Protocol

import orjson

LENGTH = struct.Struct("<I")
MAX_FRAME = 256 * 2**20
"""No reply is longer: the stream would not be the runner's."""


class ByteReader(Protocol):
    """Source of bytes: `asyncio.StreamReader`, or the reader of a container's stream."""

    async def readexactly(self, n: int) -> bytes:
        """Return n bytes, or raise `asyncio.IncompleteReadError` if the stream ends before."""
        ...


class ByteWriter(Protocol):
    """Sink of bytes: `asyncio.StreamWriter`."""

    def write(self, data: bytes) -> None:
        """Buffer bytes for sending."""
        ...

    async def drain(self) -> None:
        """Wait until the buffer accepts more."""
        ...

    def close(self) -> None:
        """Close the stream."""
        ...


class LinkError(Exception):
    """The stream ended, or its data is not a frame."""


class RunnerLink:
    """Requests to one runner, one at a time. Replies are matched by id, so that a late reply to an earlier one is dropped."""

    def __init__(self, reader: ByteReader, writer: ByteWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._number = 0

    async def request(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return its reply. The caller enforces time limits and sends one request at a time.

        Raises:
            LinkError: the runner is gone, or sends something that is not a frame.

        """
        self._number += 1
        # Not orjson: it refuses lone surrogates, which a policy may write.
        frame = json.dumps({**fields, "id": self._number}).encode()
        try:
            self._writer.write(LENGTH.pack(len(frame)) + frame)
            await self._writer.drain()
            while True:
                reply = await self._read()
                if reply.get("id") == self._number:
                    return reply
        except (OSError, EOFError, ValueError) as error:
            raise LinkError(f"{type(error).__name__}: {error}") from error

    async def _read(self) -> dict[str, Any]:
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if length > MAX_FRAME:
            raise ValueError(f"a frame of {length} bytes")
        reply = orjson.loads(await self._reader.readexactly(length))
        if not isinstance(reply, dict):
            raise ValueError(f"a frame with a {type(reply).__name__}")
        return reply

    def close(self) -> None:
        """Close the stream, at which the runner exits."""
        self._writer.close()


async def pipe_link(read_fd: int, write_fd: int) -> RunnerLink:
    """Return a link over two pipes, and take ownership of their file descriptors."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), io.FileIO(read_fd, "rb"))
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.streams.FlowControlMixin(loop=loop), io.FileIO(write_fd, "wb")
    )
    return RunnerLink(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
