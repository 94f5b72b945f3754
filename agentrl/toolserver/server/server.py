"""A tool server process: listening, start of sandbox backend and tools, graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from agentrl.config.toolserver import ToolServerConfig
from agentrl.core.background import first_ended
from agentrl.core.child_process import exit_with_parent, raise_file_limit
from agentrl.core.errors import ConfigError, PortInUseError
from agentrl.core.extras import is_installed, not_installed_error
from agentrl.obs.console import log_to_stderr, make_console, print_message
from agentrl.sandbox.base import SandboxBackend
from agentrl.sandbox.canary.check import check_backend
from agentrl.sandbox.registry import make_backend
from agentrl.toolserver import request_limits
from agentrl.toolserver.hosted_tool import HostedTool
from agentrl.toolserver.server.app import MCP_PATH, make_app
from agentrl.toolserver.server.auth import BoundedHttp, server_token
from agentrl.toolserver.server.sessions import Sessions

_log = logging.getLogger(__name__)

__all__ = ["UVICORN", "Server", "listen", "make_app", "open_sessions", "routes_for_mcp", "serve_tools"]

UVICORN: dict[str, Any] = {
    "log_level": "warning",
    "access_log": False,
    "lifespan": "off",
    "ws": "none",
    "http": BoundedHttp,
    "proxy_headers": False,
    "timeout_keep_alive": request_limits.KEEP_ALIVE_S,
    "timeout_graceful_shutdown": 2,
}
_NO_MCP = str(not_installed_error("mcp", MCP_PATH))


def listen(host: str, port: int, keys: str = "--port (tools.NAME.port), --host; port 0 is a free one") -> socket.socket:
    """Return a socket that listens on ``port`` (0: a free one).

    Args:
        host: address of this machine.
        port: of TCP.
        keys: where both are set, for messages.

    Raises:
        PortInUseError: another process does.
        ConfigError: this machine does not have the address.
    """
    # The protocol is given because asyncio disables Nagle's algorithm only then: its delay costs 40 ms a reply.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise PortInUseError(f"port {port} on {host} is in use; choose another: {keys}") from None
        raise ConfigError(f"cannot listen on {host}:{port} ({keys}): {error}") from None
    return listener


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: it would raise the signal again after its shutdown and so kill the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield


@asynccontextmanager
async def open_sessions(
    tools: Sequence[HostedTool], config: ToolServerConfig, *, sandboxed: bool
) -> AsyncIterator[Sessions]:
    """Start backend and tools, yield the sessions of a server, and close all of them at the end.

    Args:
        tools: not started yet.
        config: of the server.
        sandboxed: whether a tool runs code.

    Raises:
        MissingError, ConfigError: the backend or a tool cannot be used on this machine.
    """
    async with AsyncExitStack() as exits:
        backend: SandboxBackend | None = None
        if sandboxed:
            backend = await exits.enter_async_context(make_backend(config.sandbox))
            await check_backend(backend)
        for tool in tools:
            await tool.start()
            exits.push_async_callback(tool.close)
        sessions = Sessions(backend, tools, config.server)
        sessions.start()
        exits.push_async_callback(sessions.stop)
        yield sessions


def serve_tools(
    tools: Sequence[HostedTool], config: ToolServerConfig, *, host: str, port: int, sandboxed: bool
) -> None:
    """Serve until SIGTERM or SIGINT; running calls then get ``server.drain_timeout_s``, a second signal cuts them.

    Args:
        tools: not started yet.
        config: of the server.
        host: address to listen on; other than the loopback only with a token.
        port: 0 takes a free one.
        sandboxed: whether a tool runs code.

    Raises:
        PortInUseError: another process listens on ``port``.
        ConfigError, MissingError: the configuration, the backend or a tool cannot be used on this machine.
    """
    exit_with_parent()
    token = server_token(config.server, host)
    # Before the sandbox backend is started, which takes seconds: a port in use is reported at once.
    with listen(host, port) as listener:
        raise_file_limit()
        log_to_stderr()
        logging.getLogger("agentrl").setLevel(logging.INFO)  # the canary's table is logged at this level
        asyncio.run(_serve(tools, config, listener, token=token, sandboxed=sandboxed))


async def _serve(
    tools: Sequence[HostedTool],
    config: ToolServerConfig,
    listener: socket.socket,
    *,
    token: str | None,
    sandboxed: bool,
) -> None:
    signals = _Signals()
    try:
        async with open_sessions(tools, config, sandboxed=sandboxed) as sessions, routes_for_mcp(sessions) as routes:
            app = make_app(sessions, token=token, mounts=routes)
            server = Server(uvicorn.Config(app, **UVICORN))
            serving = asyncio.create_task(server.serve(sockets=[listener]), name="serve")
            signals.starting = None
            print_message(make_console(), _announcement(sessions, config, listener, sandboxed=sandboxed))
            async with first_ended(asyncio.shield(serving), signals.stop.wait()):
                pass
            draining = sessions.drain(config.server.drain_timeout_s)
            async with first_ended(asyncio.shield(serving), signals.hurry.wait(), draining):
                pass
            await sessions.stop()  # answers running calls before their connections are closed
            server.should_exit = True
            await serving
    except asyncio.CancelledError:
        if not signals.stop.is_set():
            raise


@asynccontextmanager
async def routes_for_mcp(sessions: Sessions) -> AsyncIterator[list[BaseRoute]]:
    """Yield the routes for MCP clients; without the SDK, one that says what to install."""
    if not is_installed("mcp"):
        _log.warning("%s", _NO_MCP)
        yield [Route(MCP_PATH, _no_mcp, methods=["GET", "POST", "DELETE"])]
        return
    from agentrl.toolserver.mcp.endpoint import mcp_routes  # its SDK takes a while

    async with mcp_routes(sessions) as routes:
        yield routes


async def _no_mcp(request: Request) -> Response:
    return JSONResponse({"error": _NO_MCP}, 501)


class _Signals:
    """SIGTERM and SIGINT as events: ``stop``, then ``hurry`` for a second one. A signal during the start cancels it."""

    def __init__(self) -> None:
        self.stop, self.hurry = asyncio.Event(), asyncio.Event()
        self.starting: asyncio.Task[None] | None = asyncio.current_task()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()
        if self.starting is not None:
            self.starting.cancel()


def _announcement(sessions: Sessions, config: ToolServerConfig, listener: socket.socket, *, sandboxed: bool) -> str:
    host, port = listener.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    kind = f"{config.sandbox.backend}, " if sandboxed else ""
    names = ", ".join(sessions.tools)
    return f"{names} serve on http://{address}:{port} ({kind}up to {config.server.max_sessions} sessions)"
