"""The server's tools over MCP: by the SDK's own client and by bare JSON-RPC, against a real server on the loopback."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import httpx2
import pytest
import uvicorn
from deadlines import until
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from agentrl.config.sandbox import SandboxConfig
from agentrl.config.toolserver import ServerConfig, ToolServerConfig
from agentrl.core.errors import SandboxFailure, ToolFailure
from agentrl.core.tool import Tool
from agentrl.core.types import ToolCall, ToolResult, ToolStatus
from agentrl.sandbox.base import Job
from agentrl.toolserver import request_limits
from agentrl.toolserver.hosted_tool import HostedTool, ToolSession
from agentrl.toolserver.mcp.endpoint import DATA, STATUS, mcp_routes
from agentrl.toolserver.sandbox_tool import SandboxTool
from agentrl.toolserver.server.server import UVICORN, listen, make_app, open_sessions
from agentrl.toolserver.server.sessions import Sessions

SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 1}},
    "required": ["text"],
    "additionalProperties": False,
}


class Echo(HostedTool):
    """Answers with the text, its place in the session, and the status that the text asks for."""

    def __init__(self) -> None:
        super().__init__(Tool("echo", "Say it again.", SCHEMA))

    async def call(self, session: ToolSession, call: ToolCall) -> ToolResult:
        text = call.arguments["text"]
        session.state["echo"] = session.state.get("echo", 0) + 1
        if text == "sandbox":
            raise SandboxFailure("the sandbox is gone")
        if text == "tool":
            raise ToolFailure("the tool is gone")
        if text.startswith("wait "):
            await asyncio.sleep(float(text.removeprefix("wait ")))
        status = ToolStatus.TIMEOUT if text == "timeout" else ToolStatus.OK
        return ToolResult(call.id, status, f"{text} {session.state['echo']}", {"said": text})


class Code(SandboxTool):
    """Python in the session's sandbox."""

    def __init__(self) -> None:
        super().__init__(Tool("code", "Run it.", SCHEMA))

    def job(self, call: ToolCall) -> Job:
        return Job(call.id, code=call.arguments["text"])


@dataclass
class Served:
    url: str
    sessions: Sessions
    connections: Callable[[], Collection[Any]]
    """Protocols of the connections that clients have open."""


@asynccontextmanager
async def served(
    tools: Sequence[HostedTool] = (),
    token: str | None = None,
    sandboxed: bool = False,
    patience_s: int | None = None,
    **server: Any,
) -> AsyncIterator[Served]:
    config = ToolServerConfig(server=ServerConfig(**server), sandbox=SandboxConfig(backend="unsafe_subprocess"))
    async with AsyncExitStack() as exits:
        sessions = await exits.enter_async_context(open_sessions(tools or [Echo()], config, sandboxed=sandboxed))
        routes = await exits.enter_async_context(mcp_routes(sessions))
        listener = exits.enter_context(listen("127.0.0.1", 0))
        server_ = uvicorn.Server(
            uvicorn.Config(
                make_app(sessions, token=token, mounts=routes),
                **{**UVICORN, "log_level": "critical", "timeout_graceful_shutdown": patience_s},
            )
        )
        serving = asyncio.create_task(server_.serve(sockets=[listener]))
        try:
            yield Served(
                f"http://127.0.0.1:{listener.getsockname()[1]}/mcp", sessions, lambda: server_.server_state.connections
            )
        finally:
            server_.should_exit = True
            await serving


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await main()

    asyncio.run(bounded())


async def say(client: Client, text: str, tool: str = "echo") -> tuple[bool, str, str]:
    """Return whether a call is an error, its status and its text."""
    result = await client.call_tool(tool, {"text": text})
    (content,) = result.content
    assert result.meta is not None
    return result.is_error, result.meta[STATUS], content.text


def test_any_client_sees_the_tools_and_has_a_session_of_its_own() -> None:
    async def main() -> None:
        async with served() as server:
            async with Client(server.url) as client, Client(server.url) as other_client:
                (tool,) = (await client.list_tools()).tools
                assert (tool.name, tool.description, tool.input_schema) == ("echo", "Say it again.", SCHEMA)
                assert len(server.sessions) == 0  # none before the first call
                assert [await say(client, "a"), await say(client, "b"), await say(other_client, "c")] == [
                    (False, "ok", "a 1"),
                    (False, "ok", "b 2"),
                    (False, "ok", "c 1"),
                ]
                data = (await client.call_tool("echo", {"text": "d"})).meta
                assert data == {STATUS: "ok", DATA: {"said": "d"}}
                assert len(server.sessions) == 2
            await until(lambda: len(server.sessions) == 0)

    run(main)


def test_files_stay_in_a_session_and_go_with_it() -> None:
    async def main() -> None:
        async with served([Code()], sandboxed=True) as server:
            async with Client(server.url) as client, Client(server.url) as other_client:
                await say(client, "open('kept', 'w').write('mine')", "code")
                assert await say(client, "print(open('kept').read())", "code") == (False, "ok", "mine")
                error, status, text = await say(other_client, "open('kept')", "code")
                assert (error, status) == (True, "error")
                assert "FileNotFoundError" in text
            await until(lambda: len(server.sessions) == 0)

    run(main)


def test_every_fault_is_a_result_that_a_model_can_read() -> None:
    async def main() -> None:
        async with served() as server, Client(server.url) as client:
            assert await say(client, "timeout") == (True, "timeout", "timeout 1")
            assert await say(client, "x", "nope") == (True, "invalid", "there is no tool 'nope'; there are: echo")
            assert await say(client, "") == (True, "invalid", "echo['text']: '' should be non-empty")
            assert await say(client, "sandbox") == (True, "sandbox_failure", "the sandbox is gone")
            assert await say(client, "tool") == (True, "unavailable", "the tool is gone")
            result = await client.call_tool("echo")
            assert result.meta == {STATUS: "invalid"}

    run(main)


def test_calls_side_by_side_get_their_own_answers() -> None:
    async def main() -> None:
        async with served() as server, Client(server.url) as client:
            waits = [0.3, 0.0, 0.2, 0.1]
            results = await asyncio.gather(*(say(client, f"wait {seconds}") for seconds in waits))
            assert [text.rpartition(" ")[0] for _, _, text in results] == [f"wait {seconds}" for seconds in waits]
            assert len(server.sessions) == 1

    run(main)


def test_a_session_that_was_closed_for_idleness_is_not_opened_again_in_silence() -> None:
    async def main() -> None:
        async with served(idle_timeout_s=0.4) as server, Client(server.url) as client:
            await say(client, "a")
            await until(lambda: len(server.sessions) == 0)
            # Its connection is open still: the client listens.
            error, status, text = await say(client, "b")
            assert (error, status) == (True, "unavailable")
            assert "was closed after 0.4 s without a call" in text

    run(main)


def test_no_more_sessions_than_the_server_takes() -> None:
    async def main() -> None:
        async with served(max_sessions=1, queue_timeout_s=0) as server:
            async with Client(server.url) as client:
                await say(client, "a")
                async with Client(server.url) as other_client:
                    error, status, text = await say(other_client, "b")
                    assert (error, status) == (True, "unavailable")
                    assert "server.max_sessions" in text
            await until(lambda: len(server.sessions) == 0)
            async with Client(server.url) as late:
                assert await say(late, "c") == (False, "ok", "c 1")

    run(main)


def test_no_more_mcp_sessions_than_the_limit_also_without_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_limits, "MCP_SESSIONS", 2)

    async def main() -> None:
        async with served() as server, httpx.AsyncClient(headers=ACCEPT) as http:
            replies = [await http.post(server.url, json=INITIALIZE) for _ in range(4)]
            assert [reply.status_code for reply in replies] == [200, 200, 503, 503]
            ended = {"mcp-session-id": replies[0].headers["mcp-session-id"]}
            assert (await http.delete(server.url, headers=ended)).status_code == 200
            assert (await http.post(server.url, json=INITIALIZE)).status_code == 200

    run(main)


def test_the_token_holds_here_too() -> None:
    async def main() -> None:
        async with served(token="secret") as server:
            async with httpx.AsyncClient() as bare:
                assert (await bare.post(server.url, json=INITIALIZE, headers=ACCEPT)).status_code == 401
            http = httpx2.AsyncClient(headers={"Authorization": "Bearer secret"})
            async with http, Client(streamable_http_client(server.url, http_client=http)) as client:
                assert await say(client, "a") == (False, "ok", "a 1")

    run(main)


ACCEPT = {"accept": "application/json, text/event-stream"}
JSON = {"content-type": "application/json"}
INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "bare", "version": "1"},
    },
}


def request(number: int, method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


def test_the_protocol_without_an_sdk() -> None:
    async def main() -> None:
        async with served() as server, httpx.AsyncClient() as http:
            hello = await http.post(server.url, json=INITIALIZE, headers=ACCEPT)
            assert hello.json()["result"]["protocolVersion"] == "2025-06-18"
            assert hello.json()["result"]["serverInfo"]["name"] == "agentrl"
            headers = {
                **ACCEPT,
                "mcp-session-id": hello.headers["mcp-session-id"],
                "mcp-protocol-version": "2025-06-18",
            }
            ready = {"jsonrpc": "2.0", "method": "notifications/initialized"}
            assert (await http.post(server.url, json=ready, headers=headers)).status_code == 202
            reply = await http.post(
                server.url, json=request(2, "tools/call", name="echo", arguments={"text": "a"}), headers=headers
            )
            assert reply.json() == {
                "jsonrpc": "2.0",
                "id": 2,
                "result": {
                    "_meta": {STATUS: "ok", DATA: {"said": "a"}},
                    "content": [{"type": "text", "text": "a 1"}],
                    "isError": False,
                },
            }
            assert len(server.sessions) == 1
            assert (await http.delete(server.url, headers=headers)).status_code == 200
            await until(lambda: len(server.sessions) == 0)
            assert (await http.post(server.url, json=request(3, "ping"), headers=headers)).status_code == 404

    run(main)


def test_what_is_no_request_of_the_protocol_is_refused() -> None:
    async def main() -> None:
        async with served() as server, httpx.AsyncClient(headers=ACCEPT) as http:
            assert (await http.post(server.url, content=b"{", headers=JSON)).status_code == 400
            assert (await http.post(server.url, json=request(1, "tools/list"))).status_code == 400
            stranger = {"mcp-session-id": "0" * 32}
            assert (await http.post(server.url, json=request(1, "tools/list"), headers=stranger)).status_code == 404
            assert (await http.delete(server.url, headers=stranger)).status_code == 404
            assert (await http.get(server.url)).status_code == 400
            assert len(server.sessions) == 0

    run(main)


def test_versions_without_sessions_are_refused_in_their_own_words() -> None:
    async def main() -> None:
        async with served() as server, httpx.AsyncClient(headers=ACCEPT) as http:
            reply = await http.post(
                server.url, json=request(7, "server/discover"), headers={"mcp-protocol-version": "2026-07-28"}
            )
            assert reply.status_code == 400
            body = reply.json()
            assert (body["id"], body["error"]["code"]) == (7, -32022)
            assert "2025-06-18" in body["error"]["data"]["supported"]
            broken = await http.post(server.url, content=b"{", headers={**JSON, "mcp-protocol-version": "2026-07-28"})
            assert (broken.status_code, broken.json()["id"]) == (400, None)

    run(main)


@pytest.mark.parametrize(
    ("origin", "status"),
    [("https://evil.example", 403), ("http://localhost:3000", 200), ("http://127.0.0.1", 200), ("null", 403)],
)
def test_pages_from_elsewhere_are_not_served(origin: str, status: int) -> None:
    async def main() -> None:
        async with served() as server, httpx.AsyncClient(headers={**ACCEPT, "origin": origin}) as http:
            assert (await http.post(server.url, json=INITIALIZE)).status_code == status

    run(main)


def test_replies_do_not_wait_for_acknowledgements() -> None:
    """They would wait for 40 ms where Nagle's algorithm meets a delayed acknowledgement."""

    async def main() -> None:
        async with served() as server, Client(server.url) as client:
            await say(client, "a")
            connections = [connection.transport.get_extra_info("socket") for connection in server.connections()]
            assert connections
            assert all(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for connection in connections)

    run(main)
