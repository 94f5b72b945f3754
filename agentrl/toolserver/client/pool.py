"""Several tool servers: the least loaded one comes first, and one that does not answer is left out until it does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence

from agentrl.core.errors import AgentrlError, ConfigError, MissingError, ToolFailure
from agentrl.toolserver.client.server import CONNECTION_ERRORS, ServerDown, ToolServer, describe_error

_log = logging.getLogger(__name__)

RETURN_S = 10.0
"""Seconds a new session waits for a server when all are down: a restart takes seconds."""
PROBE_EVERY_S = 1.0
"""Seconds between two health checks of a server that is down."""


class ServerPool:
    """Servers of one tool, and which of them answer.

    Args:
        servers: at least one.
        key: the configuration key of their addresses, for messages.
    """

    def __init__(self, servers: Sequence[ToolServer], key: str) -> None:
        assert servers, "there is a server"
        self._servers = tuple(servers)
        self._key = key
        self._down: dict[ToolServer, str] = {}
        """The last error, by server."""
        self._probes: dict[ToolServer, asyncio.Task[None]] = {}
        self._recovered = asyncio.Event()

    def by_load(self) -> Iterator[ToolServer]:
        """Iterate over the servers that answer, each once, the least loaded at that moment first."""
        tried: set[ToolServer] = set()
        while untried := [server for server in self._servers if server not in self._down and server not in tried]:
            server = min(untried, key=lambda server: server.load)
            tried.add(server)
            yield server

    async def check_servers(self) -> None:
        """Check that every server answers and has the tools of the run; concurrently.

        Raises:
            MissingError: one does not answer; with every such address and the key to change.
            ConfigError: something else than a tool server answers.
            AgentrlError: see `ToolServer.check_tools`.
        """

        async def fault(server: ToolServer) -> str | None:
            try:
                await server.check_tools(await server.instance())
            except (*CONNECTION_ERRORS, ServerDown) as error:
                reason = describe_error(error)
                return f"{self._key}={server.url}: the tool server does not answer ({reason}); start it, or change {self._key}"
            except ToolFailure as error:
                raise ConfigError(f"{self._key}={server.url}: {error}; change {self._key}") from error
            return None

        faults = await asyncio.gather(*(fault(server) for server in self._servers))
        if lines := [line for line in faults if line is not None]:
            raise MissingError("\n".join(lines))

    def check_up(self, server: ToolServer) -> None:
        """Check that a server is not known to be down.

        Raises:
            ToolFailure: it is.
        """
        if server in self._down:
            raise ToolFailure(f"{server.name} is down: it does not answer ({self._down[server]})")

    async def wait_until_up(self) -> None:
        """Wait up to `RETURN_S` until a server answers.

        Raises:
            ToolFailure: none does.
        """
        try:
            async with asyncio.timeout(RETURN_S):
                while len(self._down) == len(self._servers):
                    await self._recovered.wait()
        except TimeoutError:
            self.check_any_up()

    def check_any_up(self) -> None:
        """Check that a server answers.

        Raises:
            ToolFailure: none does; with every address and the key to change.
        """
        if len(self._down) == len(self._servers):
            faults = "; ".join(f"{server.url}: {reason}" for server, reason in self._down.items())
            raise ToolFailure(f"no tool server answers ({faults}); start one there, or change {self._key}")

    def mark_down(self, server: ToolServer, reason: str) -> None:
        """Leave a server out until a health check succeeds."""
        if server in self._down:
            return
        _log.warning("%s is left out: it does not answer (%s)", server.name, reason)
        self._down[server] = reason
        self._recovered.clear()
        self._probes[server] = asyncio.create_task(self._probe(server), name=f"probe {server.url}")

    async def _probe(self, server: ToolServer) -> None:
        while server in self._down:
            await asyncio.sleep(PROBE_EVERY_S)
            try:
                await server.instance()
            except (*CONNECTION_ERRORS, AgentrlError) as error:
                self._down[server] = describe_error(error)
            else:
                _log.warning("%s answers again and is used again", server.name)
                del self._down[server]
                self._recovered.set()

    async def aclose(self) -> None:
        """End the health checks and close all connections."""
        for probe in self._probes.values():
            probe.cancel()
        await asyncio.gather(*self._probes.values(), return_exceptions=True)
        await asyncio.gather(*(server.aclose() for server in self._servers))
