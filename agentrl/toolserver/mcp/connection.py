"""A session with somebody else's MCP server: a command that speaks over its standard streams, or an address."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import mcp.types as types
from mcp import Client, MCPError
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS, REQUEST_TIMEOUT
from pydantic import Field, PositiveFloat, ValidationError

from agentrl.config.base import Section
from agentrl.core.errors import ConfigError, MissingError, ToolFailure
from agentrl.toolserver.server.auth import is_loopback

_log = logging.getLogger(__name__)

_WITH_US = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Asks for SIGKILL at the end of its parent, makes sure that has not come yet, and becomes the command."""


def ends_with(parent: int, command: Sequence[str]) -> list[str]:
    """Return ``command`` such that the kernel kills it when ``parent``, which starts it, is gone, however that ended."""
    return [sys.executable, "-I", "-S", "-c", _WITH_US, str(parent), *command]


class McpOptions(Section):
    """Where an MCP server is, and how its tools are offered."""

    command: str | tuple[str, ...] = ()
    """Program and arguments of a server that speaks over its standard streams. It is NOT sandboxed."""
    url: str = ""
    """Address of a server that speaks streamable HTTP, in place of a command."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of the command, beside HOME, LOGNAME, PATH, SHELL, TERM and USER; it gets no others."""
    cwd: Path | None = None
    """Where the command starts; without it where the tool server did."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of requests to ``url``, such as ``Authorization``."""
    prefix: str = ""
    """Stands before the tools' names: for two servers whose tools have the same."""
    shared: bool = False
    """Use one session, and one process of the command, for all episodes: for servers that keep no state."""
    timeout_s: PositiveFloat = 30.0
    """Seconds a call may take."""
    start_timeout_s: PositiveFloat = 60.0
    """Seconds the server may take until it answers."""
    max_chars: int = Field(default=8000, ge=100)
    """Characters of a result that the policy reads; of longer ones the middle is left out."""

    def argv(self) -> tuple[str, ...]:
        """Return the command, taken apart."""
        return tuple(shlex.split(self.command)) if isinstance(self.command, str) else self.command

    def described(self) -> str:
        """Return the server in a few words, for messages: without arguments and queries, which may hold secrets."""
        if self.command:
            return self.argv()[0]
        parts = urlsplit(self.url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()

    def check(self, key: str) -> None:
        """Check that there is one server, as far as can be seen without starting it.

        Raises:
            ConfigError: there is none, or two.
            MissingError: the program is not there.

        """
        if bool(self.command) == bool(self.url):
            raise ConfigError(f"{key}: set either command or url, to say where the MCP server is")
        if self.url and urlsplit(self.url).scheme not in ("http", "https"):
            raise ConfigError(f"{key}.url={self.url}: write http://HOST:PORT/mcp")
        if self.command and shutil.which(self.argv()[0]) is None:
            raise MissingError(f"{key}.command={self.described()}: there is no program {self.argv()[0]!r} here")


class McpConnection:
    """One session of the protocol, and the process of its own that a command has.

    Args:
        options: where the server is.
        key: what the configuration calls them.
    """

    def __init__(self, options: McpOptions, key: str) -> None:
        self._options = options
        self._key = key
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._tools: tuple[types.Tool, ...] = ()
        self._stop = asyncio.Event()
        self._fault = ""
        # A task of its own: the SDK wants a connection to be closed where it was opened, and calls come from many.
        self._task = asyncio.create_task(self._run(), name=f"mcp-{key}")

    @property
    def alive(self) -> bool:
        """Whether calls can be made."""
        return not self._fault and not self._task.done()

    def when_ended(self, callback: Callable[[], object]) -> None:
        """Call back once nothing of it is left."""
        self._task.add_done_callback(lambda task: callback())

    async def tools(self) -> tuple[types.Tool, ...]:
        """Return the server's tools.

        Raises:
            ToolFailure: it does not start, or does not answer.

        """
        await self._client()
        return self._tools

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> types.CallToolResult:
        """Call a tool.

        Raises:
            TimeoutError: it did not answer in time.
            ValueError: the server refused the arguments.
            ToolFailure: the server does not start, is gone, failed itself, or does not keep to the protocol.

        """
        client = await self._client()
        try:
            return await client.call_tool(tool, dict(arguments), read_timeout_seconds=self._options.timeout_s)
        except MCPError as error:
            if error.code == REQUEST_TIMEOUT:
                raise TimeoutError from None
            if error.code == INVALID_PARAMS:
                raise ValueError(error.message) from None
            # A tool's own errors are results. This is the server's, or that of the way to it, which both may be gone.
            words = f"failed in a call: {error.message}"
            if error.code == CONNECTION_CLOSED or self._options.url:
                self._fault = words
                self._stop.set()
            raise self._failure(words) from error
        except (ValidationError, RuntimeError) as error:  # the latter is the SDK's on output that fits no schema
            raise self._failure(f"answered with what is no result: {error}") from error

    async def close(self) -> None:
        """End the session, and the process and all that it started."""
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
                    # Asked for in every session: else the SDK asks in the middle of the first call of each tool.
                    self._tools = await _list(client)
                self._ready.set_result(client)
                await self._stop.wait()
        except BaseException as error:
            self._fault = self._fault or f"does not answer: {_words(error)}"
            if not self._ready.done():
                self._ready.set_exception(self._failure(self._fault))
                self._ready.exception()  # nobody may be waiting for it
            elif not self._stop.is_set():
                _log.warning("%s: the MCP server %s: %s", self._key, self._options.described(), _words(error))
            if not isinstance(error, Exception):
                raise

    async def _transport(self, exits: AsyncExitStack) -> Any:
        if self._options.url:
            host = urlsplit(self._options.url).hostname or ""
            http = httpx2.AsyncClient(
                headers=self._options.headers,
                timeout=httpx2.Timeout(30.0, read=self._options.timeout_s + 30.0),
                trust_env=not is_loopback(host),  # no proxy stands between two servers of one machine
            )
            await exits.enter_async_context(http)
            return streamable_http_client(self._options.url, http_client=http)
        program, *arguments = ends_with(os.getpid(), self._options.argv())
        parameters = StdioServerParameters(
            command=program, args=arguments, env=self._options.env, cwd=self._options.cwd
        )
        return stdio_client(parameters, errlog=sys.__stderr__ or sys.stderr)

    def _failure(self, words: str) -> ToolFailure:
        return ToolFailure(f"the MCP server {self._options.described()} ({self._key}) {words}")


async def _list(client: Client) -> tuple[types.Tool, ...]:
    page = await client.list_tools()
    tools = page.tools
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools = [*tools, *page.tools]
    return tuple(tools)


def _words(error: BaseException) -> str:
    """Return the first cause in groups of exceptions, in words."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".removesuffix(": ")
