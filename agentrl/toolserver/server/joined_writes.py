"""A transport that sends head and body of a response together."""

from __future__ import annotations

import asyncio

from typing_extensions import override

_HEAD = b"HTTP/1.1 "
"""Begins the head of a response."""


class JoinedWrites(asyncio.Transport):
    """Sends the head of a response together with what is written next, or else in the next iteration of the event loop.

    uvicorn writes head and body one after the other, and uvloop sends each at once: two system calls, and two packets.

    Args:
        transport: that sends.
        loop: of the transport.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport, self._loop = transport, loop
        self._head = b""

    @override
    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(b"".join((head, data)))
        elif bytes(data[: len(_HEAD)]) == _HEAD:
            self._head = bytes(data)
            self._loop.call_soon(self._send_head)
        else:
            self._transport.write(data)

    @override
    def close(self) -> None:
        self._send_head()
        self._transport.close()

    @override
    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._transport.get_extra_info(name, default)

    @override
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _send_head(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)
