"""What a client can make a tool server read, keep and wait for, before and after its token is compared."""

import asyncio
import json
import tracemalloc
from collections.abc import Sequence

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from agentrl.config.toolserver import ClientConfig
from agentrl.core.errors import ToolFailure
from agentrl.core.tool import Tool
from agentrl.core.tool_arguments import MAX_NESTING
from agentrl.core.types import ToolCall, ToolResult, ToolStatus
from agentrl.toolserver import request_limits
from agentrl.toolserver.client.client import ToolServerClient
from agentrl.toolserver.hosted_tool import StatelessTool, ToolSession
from agentrl.toolserver.server.app import make_app
from tests.unit.toolserver.fake_hosts import FakeTool, app_client, echo, in_loop, make_sessions, served
from tests.unit.toolserver.fake_server import fake_servers

TOKEN = "0123456789abcdef"
HEAD = b"POST /sessions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
WITH_TOKEN = HEAD + b"authorization: Bearer " + TOKEN.encode() + b"\r\n"


async def sent(url: str, start: bytes, more: bytes, most: int) -> tuple[int, bytes]:
    """Send ``start``, and ``more`` until the server ends the connection; return the bytes sent and the reply."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    count = len(start)
    writer.write(start)
    try:
        while count < most:
            writer.write(more)
            await writer.drain()
            count += len(more)
            if reader.at_eof():
                break
        reply = await reader.read(2**16)
    except ConnectionError:
        reply = b""
    writer.transport.abort()
    return count, reply


ENDLESS = {
    "the path": (b"GET /", b"x" * 2**14),
    "a header": (HEAD + b"x: ", b"x" * 2**14),
    "a header's name": (HEAD, b"x" * 2**14),
    "headers": (HEAD, b"x-many: 1\r\n" * 2**10),
    "a folded header": (HEAD + b"x: 1\r\n", b" more\r\n" * 2**10),
    "the line of a chunk": (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1" * 2**14),
    "the extension of a chunk": (HEAD + b"transfer-encoding: chunked\r\n\r\n1;x=", b"x" * 2**14),
    "trailers": (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"x-many: 1\r\n" * 2**10),
}


@pytest.mark.parametrize("header_part", ENDLESS)
@in_loop
async def test_headers_are_limited_before_the_token_is_compared(header_part: str) -> None:
    sessions = make_sessions()
    async with served(make_app(sessions, token=TOKEN)) as url:
        count, _ = await sent(url, *ENDLESS[header_part], 64 * 2**20)
        assert count < 16 * 2**20, "sockets buffer some of it"
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{url}/health")).status_code == 200
    assert len(sessions) == 0


HALF_SENT = {
    "nothing": [],
    "half a line": [b"POST /sess"],
    "half a head": [HEAD],
    "half a body": [WITH_TOKEN + b"content-length: 10\r\n\r\n{"],
    "half a body without the token": [HEAD + b"content-length: 10\r\n\r\n{"],
    "half a chunked body": [WITH_TOKEN + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"],
    "drops of a head": [HEAD, *([b"x: 1\r\n"] * 1000)],
    "drops of a body": [WITH_TOKEN + b"content-length: 10000\r\n\r\n", *([b" "] * 1000)],
    "drops of a body without the token": [HEAD + b"content-length: 10000\r\n\r\n", *([b" "] * 1000)],
    "half a second request": [WITH_TOKEN + b"content-length: 0\r\n\r\n", b"GET /he"],
    "half a second request in one piece": [WITH_TOKEN + b"content-length: 0\r\n\r\nGET /he"],
}


@pytest.mark.parametrize("kind", HALF_SENT)
@in_loop
async def test_half_sent_requests_end(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_limits, "RECEIVE_S", 0.15)
    loop = asyncio.get_running_loop()
    async with served(make_app(make_sessions(), token=TOKEN)) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        began = loop.time()

        async def drop() -> None:
            for piece in HALF_SENT[kind]:
                writer.write(piece)
                await asyncio.sleep(0.02)

        dropping = asyncio.create_task(drop())
        try:
            async with asyncio.timeout(5):
                while await reader.read(2**16):
                    pass
        except ConnectionError:
            pass
        assert 0.1 < loop.time() - began < 3
        dropping.cancel()
        await asyncio.gather(dropping, return_exceptions=True)
        writer.transport.abort()


@in_loop
async def test_a_long_call_and_an_idle_connection_are_no_half_sent_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(session: ToolSession, call: ToolCall) -> ToolResult:
        await asyncio.sleep(0.4)
        return await echo(session, call)

    monkeypatch.setattr(request_limits, "RECEIVE_S", 0.1)
    connections = 0

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal connections
        connections = len({*seen, scope["client"]})
        seen.add(scope["client"])
        await app(scope, receive, send)

    app, seen = make_app(make_sessions(FakeTool(slow))), set[object]()
    async with served(counted) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        session = (await client.post("/sessions")).json()["session_id"]
        body = {"call_id": "c", "tool": "fake", "arguments": {}}
        assert (await client.post(f"/sessions/{session}/call", json=body)).json()["status"] == "ok"
        await asyncio.sleep(0.3)
        assert (await client.get("/health")).status_code == 200
    assert connections == 1


@in_loop
async def test_bodies_are_limited_on_every_route_and_not_read_without_the_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_limits, "BODY_BYTES", 1000)
    async with served(make_app(make_sessions(Upper()), token=TOKEN)) as url:
        for head, status in ((WITH_TOKEN, b"413"), (HEAD, b"401")):
            chunked = head + b"transfer-encoding: chunked\r\n\r\n"
            count, reply = await sent(url, chunked, b"400\r\n" + b" " * 2**10 + b"\r\n", 4 * 2**20)
            assert reply.split(b" ")[1] == status, (count, reply)
            _, reply = await sent(url, head + b"content-length: 1001\r\n\r\n", b" " * 1001, 1002)
            assert reply.split(b" ")[1] == b"413"
        too_long = [b"9" * 30, b"9" * 5000]
        for length in too_long:
            _, reply = await sent(url, WITH_TOKEN + b"content-length: " + length + b"\r\n\r\n", b" ", 1)
            assert reply.split(b" ")[1] in (b"400", b"413")


class Upper(StatelessTool):
    """Answers in capitals."""

    def __init__(self) -> None:
        super().__init__(Tool("upper", "Answers in capitals.", {"type": "object"}), max_batch=8)

    async def call_batch(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        return [ToolResult(call.id, ToolStatus.OK, str(call.arguments.get("text")).upper()) for call in calls]


def nested(depth: int, kind: str = "list") -> object:
    value: object = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value}
    return value


def nested_json(depth: int, kind: str) -> str:
    opening, right = ("[", "]") if kind == "list" else ('{"a":', "}")
    return opening * depth + "1" + right * depth


DEPTHS = [MAX_NESTING, 300, 800, *range(930, 1000, 4), 1100, 5000, 100_000]


@pytest.mark.parametrize("kind", ["list", "object"])
@in_loop
async def test_nested_arguments_are_invalid_and_never_an_error_of_the_server(kind: str) -> None:
    async with app_client(make_app(make_sessions(FakeTool(echo), Upper()))) as client:
        session = (await client.post("/sessions")).json()["session_id"]
        for depth in DEPTHS:
            deep = nested_json(depth, kind)
            for path, call in (
                (
                    f"/sessions/{session}/call",
                    f'{{"call_id": "{depth}", "tool": "fake", "arguments": {{"n": {deep}}}}}',
                ),
                ("/calls", f'{{"calls": [{{"call_id": "c", "tool": "upper", "arguments": {{"n": {deep}}}}}]}}'),
            ):
                reply = await client.post(path, content=call)
                assert reply.status_code in (200, 400), (depth, path, reply.text[:200])
                if reply.status_code == 200:
                    result = reply.json().get("results", [reply.json()])[0]
                    assert result["status"] == "invalid", (depth, path)
                    assert f"more than {MAX_NESTING} levels" in result["content"] or "recursion" in result["content"]
        shallow = {"call_id": "shallow", "tool": "fake", "arguments": {"n": nested(MAX_NESTING - 1, kind)}}
        assert (await client.post(f"/sessions/{session}/call", json=shallow)).json()["status"] == "ok"


@pytest.mark.parametrize("stateless", [False, True])
@in_loop
async def test_a_client_gets_a_typed_error_for_nested_arguments_and_other_episodes_their_results(
    stateless: bool,
) -> None:
    tool = Upper()
    async with served(make_app(make_sessions(tool))) as url:
        client = ToolServerClient(url, ClientConfig(retries=0), key="tools.upper.url", stateless=stateless)
        texts: list[object] = [nested(depth) for depth in (MAX_NESTING, 962, 5000)]
        texts += ["x" * request_limits.CALL_BYTES] * stateless
        calls = [ToolCall("bad", "upper", {"text": text}) for text in texts]
        calls += [ToolCall("good", "upper", {"text": "a"})] * 3
        results = await asyncio.gather(
            *(client.call(call, episode_id=str(number)) for number, call in enumerate(calls))
        )
        for result in results:
            expected = ToolStatus.OK if result.call_id == "good" else ToolStatus.INVALID
            assert result.status is expected, result.content[:200]
        await client.aclose()


@in_loop
async def test_a_server_that_failed_once_is_asked_on_a_new_connection_before_it_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with fake_servers() as (server,):
        server.closes_after_errors = True
        client = ToolServerClient(server.url, ClientConfig(retries=0), key="tools.python.url")
        await asyncio.gather(*(client.call(ToolCall("0", "python", {}), episode_id=f"e{n}") for n in range(4)))
        server.answers["/call"] = [(500, {"error": "bug"})] * 4
        failed = await asyncio.gather(
            *(client.call(ToolCall("1", "python", {}), episode_id=f"e{n}") for n in range(4)), return_exceptions=True
        )
        assert all(isinstance(error, ToolFailure) and "HTTP 500" in str(error) for error in failed), failed
        assert "left out" not in caplog.text
        health = {on for (_, path), on in zip(server.asked, server.asked_on, strict=True) if path == "/health"}
        other_servers = {on for (_, path), on in zip(server.asked, server.asked_on, strict=True) if path != "/health"}
        assert len(health) == server.count("GET", "/health")
        assert not health & other_servers
        await client.aclose()


@in_loop
async def test_what_a_session_keeps_for_retries_is_small() -> None:
    """Ids and texts are the worst that a client and a tool can choose: four bytes a character in Python."""

    async def wide(session: ToolSession, call: ToolCall) -> ToolResult:
        return ToolResult(call.id, ToolStatus.OK, "x" * 2000 + "🙂", [["x"] * 50])

    tool = FakeTool(wide)
    session = await make_sessions(tool).open()
    tracemalloc.start()
    try:
        traced_memory_before, _ = tracemalloc.get_traced_memory()
        for number in range(3 * request_limits.KEPT_IDS):
            await session.call(ToolCall(f"{number:0250d}🙂", "fake", {"n": number}))
            tool.calls.clear()
        traced_memory_after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert traced_memory_after - traced_memory_before < 2 * request_limits.KEPT_BYTES
    last = ToolCall(f"{3 * request_limits.KEPT_IDS - 1:0250d}🙂", "fake", {"n": 3 * request_limits.KEPT_IDS - 1})
    assert json.loads((await session.call(last)).body)["data"] == [["x"] * 50]
