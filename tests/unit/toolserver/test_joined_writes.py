"""Head and body of a response are one write; nothing is held back, lost or reordered."""

import asyncio

from agentrl.toolserver.server.joined_writes import JoinedWrites

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Socket(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def close(self) -> None:
        self.written.append(b"closed")

    def is_closing(self) -> bool:
        return self.written[-1:] == [b"closed"]


def test_head_and_body_are_one_write() -> None:
    async def respond() -> list[bytes]:
        socket = Socket()
        joined = JoinedWrites(socket, asyncio.get_running_loop())
        joined.write(HEAD)
        assert socket.written == []
        joined.write(memoryview(b"body"))
        assert socket.written == [HEAD + b"body"]
        joined.write(b"more")
        await asyncio.sleep(0)
        joined.write(HEAD)  # of a stream whose first event comes later
        await asyncio.sleep(0)
        joined.write(b"event")
        joined.write(HEAD)
        joined.close()
        await asyncio.sleep(0)
        assert joined.is_closing()
        return socket.written

    assert asyncio.run(respond()) == [HEAD + b"body", b"more", HEAD, b"event", HEAD, b"closed"]
