"""A session with an external MCP server: a command that speaks over stdio, or an address (streamable HTTP)."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx2
import mcp.types as types
from mcp import Client, MCPError
from mcp.client.sse import sse_client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS, REQUEST_TIMEOUT
from pydantic import Field, ValidationError

from agentrl.config.base import Seconds, Section
from agentrl.core.errors import ConfigError, MissingError, ToolFailure
from agentrl.core.user_code import TimeLimitExceeded
from agentrl.toolserver.server.auth import is_loopback

_log = logging.getLogger(__name__)

_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Requests SIGKILL at the end of its parent, checks that the parent still lives, and executes the command."""


def kill_with_parent(parent: int, command: Sequence[str]) -> list[str]:
    """Return ``command`` wrapped so that the kernel kills it when ``parent``, which starts it, ends in any way."""
    return [sys.executable, "-I", "-S", "-c", _WITH_PARENT, str(parent), *command]


class McpOptions(Section):
    """Options of an external MCP server and its tools."""

    command: str | tuple[str, ...] = ()
    """Program and arguments of a server that speaks over stdio. It is NOT sandboxed."""
    url: str = ""
    """Address of a server that speaks HTTP, instead of a command."""
    transport: Literal["streamable-http", "sse"] = "streamable-http"
    """How a server at ``url`` speaks; ``sse`` is the older way."""
    socket: Path | None = None
    """Unix socket that is connected in place of the host in ``url``."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the command, besides HOME, LOGNAME, PATH, SHELL, TERM and USER; it gets no others."""
    cwd: Path | None = None
    """Working directory of the command; without it that of the tool server."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of requests to ``url``, such as ``Authorization``."""
    prefix: str = ""
    """Prefix of the tools' names, for two servers with tools of the same name."""
    shared: bool = False
    """Use one session, and one process of the command, for all episodes: for servers without state."""
    timeout_s: Seconds = 30.0
    """Seconds a call may take."""
    start_timeout_s: Seconds = 60.0
    """Seconds until the server must answer."""
    max_chars: int = Field(default=8000, ge=100)
    """Characters of a result that the policy reads; the middle of longer ones is left out."""
    images: bool = False
    """Whether images of results reach the policy, which must be a vision-language model. Otherwise a text names them."""

    def argv(self) -> tuple[str, ...]:
        """Return the command as a list of words."""
        return tuple(shlex.split(self.command)) if isinstance(self.command, str) else self.command

    def display_name(self) -> str:
        """Return the server's program or address, for messages; without arguments and queries, which may hold secrets."""
        if self.command:
            return self.argv()[0]
        parsed = urlsplit(self.url)
        return parsed._replace(netloc=parsed.netloc.rpartition("@")[2], query="", fragment="").geturl()

    def check(self, key: str) -> None:
        """Check that one server is configured, without starting it.

        Raises:
            ConfigError: none or two are configured.
            MissingError: the program does not exist.
        """
        if bool(self.command) == bool(self.url):
            raise ConfigError(
                f"{key}: set either command or url of the MCP server; in a run, register a McpService with it "
                "(docs/how_to/tools.md)"
            )
        if self.url and urlsplit(self.url).scheme not in ("http", "https"):
            raise ConfigError(f"{key}.url={self.url}: write http://HOST:PORT/mcp")
        try:
            self.argv()
        except ValueError as error:  # the command may hold secrets
            raise ConfigError(f"{key}.command has no words as a shell reads them: {error}") from None
        if self.command and shutil.which(self.argv()[0]) is None:
            raise MissingError(f"{key}.command={self.display_name()}: there is no program {self.argv()[0]!r} here")


class McpConnection:
    """One MCP session, and with a command the process of its server.

    Args:
        options: of the server.
        key: their configuration key, for messages.
    """

    def __init__(self, options: McpOptions, key: str) -> None:
        self._options = options
        self._key = key
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._tools: tuple[types.Tool, ...] = ()
        self._stop = asyncio.Event()
        self._fault = ""
        # In one task, because the SDK must close a connection in the task that opened it, and calls come from many.
        self._task = asyncio.create_task(self._run(), name=f"mcp-{key}")

    @property
    def alive(self) -> bool:
        """Whether calls can be made."""
        return not self._fault and not self._task.done()

    def when_ended(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` when session and process have ended."""
        self._task.add_done_callback(lambda task: callback())

    async def tools(self) -> tuple[types.Tool, ...]:
        """Return the server's tools.

        Raises:
            ToolFailure: it does not start or does not answer.
        """
        await self._client()
        return self._tools

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> types.CallToolResult:
        """Call a tool.

        Raises:
            TimeLimitExceeded: it did not answer in time.
            ValueError: the server refused the arguments.
            ToolFailure: the server does not start, has ended, reported an error of the server, or violated the protocol.
        """
        client = await self._client()
        limit, started = self._options.timeout_s, time.monotonic()
        try:
            return await client.call_tool(tool, dict(arguments), read_timeout_seconds=limit)
        except MCPError as error:
            if error.code == REQUEST_TIMEOUT and time.monotonic() - started >= limit:  # a server may use the code, too
                raise TimeLimitExceeded(f"it took longer than {limit:g} s") from None
            if error.code == INVALID_PARAMS:
                raise ValueError(error.message) from None
            # Errors of the tool are results. This is one of the server or of the connection, which both may have ended.
            fault = f"failed in a call: {error.message}"
            if error.code == CONNECTION_CLOSED or self._options.url:
                self._fault = fault
                self._stop.set()
            raise self._failure(fault) from error
        except (ValidationError, RuntimeError) as error:  # the latter is the SDK's on output that fits no schema
            raise self._failure(f"answered with an invalid result: {error}") from error

    async def close(self) -> None:
        """End the session, the process, and all processes that it started."""
        self._stop.set()
        if not self._ready.done():
            self._task.cancel()
        await asyncio.wait([self._task])

    async def _client(self) -> Client:
        if self._fault:
            raise self._failure(self._fault)
        return await asyncio.shield(self._ready)

    async def _run(self) -> None:
        try:
            async with AsyncExitStack() as exits:
                async with asyncio.timeout(self._options.start_timeout_s):
                    client = await exits.enter_async_context(Client(await self._transport(exits)))
                    # Listed in every session: otherwise the SDK lists them during the first call of each tool.
                    self._tools = await _list(client)
                self._ready.set_result(client)
                await self._stop.wait()
        except BaseException as error:
            self._fault = self._fault or f"does not answer: {_describe_error(error)}"
            if not self._ready.done():
                self._ready.set_exception(self._failure(self._fault))
                self._ready.exception()  # marks it as retrieved: no call may be waiting for it
            elif not self._stop.is_set():
                _log.warning(
                    "%s: the MCP server %s: %s", self._key, self._options.display_name(), _describe_error(error)
                )
            if not isinstance(error, Exception):
                raise

    async def _transport(self, exits: AsyncExitStack) -> Any:
        if self._options.url:
            host = urlsplit(self._options.url).hostname or ""
            unix_socket = self._options.socket
            http = httpx2.AsyncClient(
                headers=self._options.headers,
                timeout=httpx2.Timeout(30.0, read=self._options.timeout_s + 30.0),
                transport=None if unix_socket is None else httpx2.AsyncHTTPTransport(uds=str(unix_socket)),
                # no proxy between two servers of one machine
                trust_env=unix_socket is None and not is_loopback(host),
            )
            if self._options.transport == "sse":
                return sse_client(self._options.url, httpx_client_factory=lambda *_, **__: http)
            await exits.enter_async_context(http)
            return streamable_http_client(self._options.url, http_client=http)
        program, *arguments = kill_with_parent(os.getpid(), self._options.argv())
        parameters = StdioServerParameters(
            command=program, args=arguments, env=self._options.env, cwd=self._options.cwd
        )
        return stdio_client(parameters, errlog=sys.__stderr__ or sys.stderr)

    def _failure(self, fault: str) -> ToolFailure:
        return ToolFailure(f"the MCP server {self._options.display_name()} ({self._key}) {fault}")


async def _list(client: Client) -> tuple[types.Tool, ...]:
    page = await client.list_tools()
    tools = page.tools
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools = [*tools, *page.tools]
    return tuple(tools)


def _describe_error(error: BaseException) -> str:
    """Return the first error of nested exception groups, as text."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ValidationError):  # of what the server has sent
        first = error.errors(include_url=False)[0]
        return f"{error.title} does not fit the protocol: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    return f"{type(error).__name__}: {error}".removesuffix(": ")
