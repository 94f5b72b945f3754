"""Tools, sandboxes and servers by hand, for tests of the tool server."""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from deadlines import until
from starlette.applications import Starlette
from starlette.types import ASGIApp

from agentrl.config.toolserver import ServerConfig
from agentrl.core.tool import Tool
from agentrl.core.types import ToolCall, ToolResult, ToolStatus
from agentrl.sandbox.base import Job, SandboxBackend
from agentrl.toolserver.hosted_tool import HostedTool, ToolSession
from agentrl.toolserver.server.server import UVICORN, listen
from agentrl.toolserver.server.sessions import Sessions

Schema = dict[str, Any]
ANYTHING: Schema = {"type": "object"}
HANGS_S = 120.0
"""After which a test of seconds hangs, also on a machine with many other tests."""


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a coroutine test in a loop of its own; one that hangs fails."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(HANGS_S):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return run


class FakeTool(HostedTool):
    """A tool whose work is a function; counts what it was asked."""

    def __init__(
        self,
        work: Callable[[ToolSession, ToolCall], Awaitable[ToolResult]],
        name: str = "fake",
        schema: Schema = ANYTHING,
    ) -> None:
        super().__init__(Tool(name, "Does as the test says.", schema))
        self.work = work
        self.calls: list[ToolCall] = []

    async def call(self, session: ToolSession, call: ToolCall) -> ToolResult:
        self.calls.append(call)
        return await self.work(session, call)


class Gate:
    """Work that waits until the test lets it go, and then answers with its arguments."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.cancelled = 0

    async def __call__(self, session: ToolSession, call: ToolCall) -> ToolResult:
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return await echo(session, call)


async def echo(session: ToolSession, call: ToolCall) -> ToolResult:
    """Answer with the session and the arguments."""
    return ToolResult(call.id, ToolStatus.OK, f"{call.id} {dict(call.arguments)}", {"session": session.id})


async def in_sandbox(session: ToolSession, call: ToolCall) -> ToolResult:
    """Answer with what the sandbox says, and the sandbox's name."""
    sandbox = await session.sandbox()
    outcome = await sandbox.run(Job(call.id, code=str(call.arguments.get("code", ""))))
    return ToolResult(call.id, outcome.status, outcome.stdout, sandbox.id)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_sessions(*tools: HostedTool, backend: SandboxBackend | None = None, **kwargs: Any) -> Sessions:
    """Return sessions; further arguments are the server's configuration, but for ``clock``."""
    clock = {"clock": kwargs.pop("clock")} if "clock" in kwargs else {}
    return Sessions(backend, list(tools), ServerConfig(**kwargs), **clock)


def app_client(app: Starlette, **kwargs: Any) -> httpx.AsyncClient:
    """Return a client of an application, without a socket between them."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", **kwargs)


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[str]:
    """Serve on a free port, with the limits of a real server, and yield the address."""
    with listen("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(app, **UVICORN))
        serving = asyncio.create_task(server._serve(sockets=[listener]))
        await until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await serving


def statuses(results: Sequence[ToolResult]) -> list[str]:
    return [result.status.value for result in results]
