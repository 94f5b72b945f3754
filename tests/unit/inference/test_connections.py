"""Connections that stay open: whose reply is whose, how replies end, and which connections are kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from deadlines import run_ready_tasks, until

from agentrl.inference.client import http as http_module
from agentrl.inference.client.connections import KeptConnections
from agentrl.inference.client.http import EngineHttp, ErrorReply

Play = Callable[["Server", KeptConnections], Awaitable[None]]


class Server:
    """Answers each request with what ``answer`` makes of its body; an empty answer, or one cut short, closes the connection."""

    def __init__(self, answer: Callable[[bytes], bytes] = lambda body: reply_of(body)) -> None:
        self.answer = answer
        self.heads: list[bytes] = []
        self.connections = 0
        self.closed = 0
        self.answering = asyncio.Event()
        self.answering.set()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                self.heads.append(head)
                await self.answering.wait()
                answer = self.answer(body)
                writer.write(answer)
                if b"keep" not in answer:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed += 1
            writer.close()


def reply_of(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nx: keep\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def run(play: Play, server: Server | None = None, *, read_s: float = 20.0, keep_s: float = 20.0) -> None:
    async def session() -> None:
        served = server or Server()
        listener = await asyncio.start_server(served.serve, "127.0.0.1", 0)
        served.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        connections = KeptConnections(connect_s=20.0, read_s=read_s, keep_s=keep_s)
        async with listener, asyncio.timeout(20):
            try:
                await play(served, connections)
            finally:
                connections.close()

    asyncio.run(session())


def test_each_request_has_its_own_reply_over_few_connections() -> None:
    """Eight tasks, of which each sends its next request as soon as it has a reply: a connection may change tasks at once."""

    async def play(server: Server, connections: KeptConnections) -> None:
        async def send(task: int) -> None:
            for number in range(20):
                content = b"%d/%d" % (task, number)
                assert (await connections.post(server.url, "/a", content)).content == content

        await asyncio.gather(*(send(task) for task in range(8)))
        assert server.connections <= 8
        assert len(server.heads) == 160

    run(play)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nx: keep\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nx: keep\r\ncontent-length: 3\r\n\r\nabc",
    ],
    ids=["chunked", "ends with the connection", "closed", "continued"],
)
def test_how_replies_end(answer: bytes) -> None:
    async def play(server: Server, connections: KeptConnections) -> None:
        for _ in range(2):
            reply = await connections.post(server.url, "/a", b"{}")
            assert (reply.status, reply.content) == (200, b"abc")
        assert server.connections == (1 if b"keep" in answer else 2)

    run(play, Server(lambda body: answer))


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", aiohttp.ServerDisconnectedError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", aiohttp.ClientPayloadError),
        (b"220 mail ready\r\n", aiohttp.ClientPayloadError),
    ],
    ids=["nothing", "cut", "no HTTP"],
)
def test_replies_that_are_not_whole(answer: bytes, error: type[Exception]) -> None:
    """Only what failed before the reply may be sent again: the second error is no `aiohttp.ClientConnectionError`."""

    async def play(server: Server, connections: KeptConnections) -> None:
        with pytest.raises(error):
            await connections.post(server.url, "/a", b"{}")

    run(play, Server(lambda body: answer))


def test_a_request_that_is_cancelled_closes_its_connection() -> None:
    async def play(server: Server, connections: KeptConnections) -> None:
        server.answering.clear()
        task = asyncio.create_task(connections.post(server.url, "/a", b"{}"))
        await until(lambda: bool(server.heads))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        server.answering.set()
        assert (await connections.post(server.url, "/a", b"1")).content == b"1"
        assert server.connections == 2

    run(play)


def test_a_server_that_says_nothing() -> None:
    async def play(server: Server, connections: KeptConnections) -> None:
        server.answering.clear()
        with pytest.raises(aiohttp.SocketTimeoutError):
            await connections.post(server.url, "/a", b"{}")
        server.answering.set()

    run(play, read_s=0.05)


def test_a_request_that_is_cancelled_with_its_reply_leaves_the_connection_to_the_next() -> None:
    async def play(server: Server, connections: KeptConnections) -> None:
        first = asyncio.create_task(connections.post(server.url, "/a", b"1"))
        while not connections._idle:
            await asyncio.sleep(0)
            if connections._idle and not first.done():
                first.cancel()  # its reply is there, and its task has not run since
        second = asyncio.create_task(connections.post(server.url, "/a", b"2"))
        assert (await second).content == b"2"
        await asyncio.gather(first, return_exceptions=True)
        assert server.connections == 1

    run(play)


def test_unused_connections_are_closed() -> None:
    async def play(server: Server, connections: KeptConnections) -> None:
        await connections.post(server.url, "/a", b"1")
        await until(lambda: bool(server.closed))
        await run_ready_tasks()
        assert not connections._open

    run(play, keep_s=0.01)


def test_a_connection_to_an_earlier_address_is_not_used() -> None:
    async def play(server: Server, connections: KeptConnections) -> None:
        await connections.post(server.url, "/a", b"1")
        await connections.post(server.url.replace("127.0.0.1", "user:word@127.0.0.1") + "/b%20c", "/a", b"1")
        assert server.connections == 2
        assert server.heads[1].startswith(b"POST /b%20c/a HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"authorization: Basic dXNlcjp3b3Jk\r\n" in server.heads[1]

    run(play)


def test_an_error_status_has_the_engines_message() -> None:
    content = b'{"error":{"message":"gone"}}'
    head = b"HTTP/1.1 503 Busy\r\nx: keep\r\nX-SMG-Error-Code: no_available_workers\r\ncontent-length: %d\r\n\r\n"
    answer = head % len(content) + content

    async def play(server: Server, connections: KeptConnections) -> None:
        http = EngineHttp(server.url, 20.0)
        body: dict[str, Any] = {"rid": "r"}
        with pytest.raises(ErrorReply, match="HTTP 503: gone") as caught:
            await http.generate(body, key="s/1")
        assert caught.value.engine_lost
        assert b"x-smg-routing-key: s/1\r\n" in server.heads[0]
        with pytest.raises(ValueError, match="no header can have"):
            await http.generate(body, key="s\r\nx: y")
        await http.aclose()

    run(play, Server(lambda body: answer))


def test_a_control_request_after_the_loop_was_busy_has_a_new_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine may have closed the idle one meanwhile, which only a loop that runs notices."""
    monkeypatch.setattr(http_module, "_KEEP_CONTROL_S", 0.01)

    async def play(server: Server, connections: KeptConnections) -> None:
        http = EngineHttp(server.url, 20.0)
        for expected in (1, 2):
            async with http.request("POST", "/pause", {}, once=True) as reply:
                assert await reply.read() == b"{}"
            assert server.connections == expected
            time.sleep(0.03)  # noqa: ASYNC251
        await http.aclose()

    run(play)
