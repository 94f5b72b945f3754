"""MCP servers of a task: programs in its machine, or what listens in the machine, in a service or elsewhere."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from agentrl import TaskError, ToolCall, ToolFailure, ToolResult, ToolStatus
from agentrl.containers.allowlist import is_allowed
from agentrl.containers.attach import attached_command, inner_socket
from agentrl.containers.machine import Machine
from agentrl.containers.task_folder import TaskFolder
from agentrl.containers.task_needs import is_inside
from agentrl.containers.task_toml import McpServerToml, expand_header
from agentrl.core.errors import SandboxFailure
from agentrl.core.user_code import TimeLimitExceeded

if TYPE_CHECKING:
    from agentrl.toolserver.mcp.connection import McpConnection, McpOptions

_STRANGE = re.compile(r"[^a-zA-Z0-9_-]+")
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class McpLimits:
    """Limits of calls."""

    timeout_s: float
    """Seconds of a call."""
    max_chars: int
    """Characters of a result that the policy reads."""
    reads_images: bool = False
    """Whether images of results are carried; otherwise a text names them."""


class McpServers:
    """The servers of an episode.

    Args:
        folder: of the task.
        machine: of the episode.
        limits: of calls.
        lost: servers that an earlier process of the tool server has called, so that they may hold something that is gone.
    """

    def __init__(self, folder: TaskFolder, machine: Machine, limits: McpLimits, lost: frozenset[str]) -> None:
        # Of several with the same name the last one counts, as in Harbor.
        self._servers = {server.name: server for server in folder.config.environment.mcp_servers}
        self._folder = folder
        self._machine = machine
        self._limits = limits
        self._lost = lost
        self._connections: dict[str, McpConnection] = {}
        self._exits = AsyncExitStack()

    async def tools(self, user: str | None) -> list[dict[str, Any]]:
        """Start the servers, and return their tools as JSON: ``name`` for the policy, description, parameters, server and tool.

        Raises:
            TaskError: two tools have the same name, or a server cannot be reached in the machine's network.
            ToolFailure: a server does not answer.
        """
        tools: dict[str, dict[str, Any]] = {}
        for server in self._servers.values():
            for tool in await (await self._connect(server, user)).tools():
                name = _STRANGE.sub("_", f"{server.name}_{tool.name}")
                if name in tools:
                    raise TaskError(f"task {self._folder.name}: its MCP servers have two tools {name}")
                tools[name] = {
                    "name": name,
                    "description": tool.description or tool.title or tool.name,
                    "parameters": tool.input_schema,
                    "server": server.name,
                    "tool": tool.name,
                }
        return list(tools.values())

    def descriptions(self) -> dict[str, dict[str, Any]]:
        """Return the servers by name as agent programs read them, in the form of ``mcpServers`` in a file ``.mcp.json``.

        Raises:
            ValueError: a header names a variable that this process does not have.
        """
        descriptions: dict[str, dict[str, Any]] = {}
        for name, server in self._servers.items():
            if server.transport == "stdio":
                descriptions[name] = {"type": "stdio", "command": server.command, "args": list(server.args)}
                continue
            kind = "sse" if server.transport == "sse" else "http"
            descriptions[name] = {"type": kind, "url": server.url, "headers": self._headers(server)}
        return descriptions

    async def call(self, call: ToolCall, user: str | None) -> ToolResult:
        """Call a tool: arguments ``server``, ``tool`` and ``arguments``. What goes wrong in the machine is a result.

        Raises:
            SandboxFailure: the server has lost what it had in memory.
            ToolFailure: a server outside of the machine failed.
        """
        from agentrl.toolserver.mcp.client import from_mcp

        server = self._servers[call.arguments["server"]]
        if server.transport == "stdio" and server.name in self._lost:
            raise SandboxFailure(
                f"the MCP server {server.name} ended with the tool server, and has lost what it had in memory"
            )
        limit = self._limits.timeout_s
        try:
            connection = await self._connect(server, user)
            result = await connection.call(call.arguments["tool"], call.arguments["arguments"])
        except TimeLimitExceeded:
            return ToolResult(call.id, ToolStatus.TIMEOUT, f"[{server.name} did not answer in {limit:g} s]")
        except ValueError as error:
            return ToolResult(call.id, ToolStatus.INVALID, f"[{server.name}: {error}]")
        except ToolFailure as error:
            if not self._is_inside(server):
                raise
            # The agent may have ended it.
            return ToolResult(call.id, ToolStatus.ERROR, f"[{error}]")
        return from_mcp(call, result, self._limits.max_chars, reads_images=self._limits.reads_images)

    async def _connect(self, server: McpServerToml, user: str | None) -> McpConnection:
        from agentrl.toolserver.mcp.connection import McpConnection

        if server.name not in self._connections:
            options = await self._options(server, user)
            connection = McpConnection(options, f"environment.mcp_servers.{server.name}")
            self._connections[server.name] = connection
            self._exits.push_async_callback(connection.close)
        return self._connections[server.name]

    async def _options(self, server: McpServerToml, user: str | None) -> McpOptions:
        from agentrl.toolserver.mcp.connection import McpOptions

        key = f"environment.mcp_servers.{server.name}"
        limits: Mapping[str, Any] = {"timeout_s": self._limits.timeout_s, "max_chars": self._limits.max_chars}
        if server.transport == "stdio":
            words = (str(server.command), *server.args)
            return McpOptions(command=attached_command(self._machine, words, user=user), **limits)
        url = urlsplit(str(server.url))
        host, port = url.hostname or "", url.port or _PORTS.get(url.scheme, 80)
        socket = None
        if self._is_inside(server):
            name = "localhost" if host in ("127.0.0.1", "::1") else host
            socket = await self._exits.enter_async_context(inner_socket(self._machine, name, port, key))
        elif self._machine.spec.network == "no-network" or (
            self._machine.spec.network == "allowlist" and not is_allowed(host, self._machine.spec.allowed_hosts)
        ):
            raise TaskError(f"task {self._folder.name}: {key}: its machine does not reach {host}")
        headers = self._headers(server)
        return McpOptions(url=str(server.url), transport=server.transport, socket=socket, headers=headers, **limits)

    def _headers(self, server: McpServerToml) -> dict[str, str]:
        key = f"environment.mcp_servers.{server.name}.headers"
        return {name: expand_header(value, os.environ, f"{key}.{name}") for name, value in server.headers.items()}

    def _is_inside(self, server: McpServerToml) -> bool:
        return is_inside(server, {service.name for service in self._machine.spec.services})

    async def close(self) -> None:
        """End the programs and the connections."""
        self._connections.clear()
        await self._exits.aclose()
