"""Several tool servers: new sessions go to the least loaded, one that does not answer is taken out and tried again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import httpx

from agentrl.core.errors import AgentrlError, ToolFailure
from agentrl.toolserver.client.server import BACKOFF_S, Busy, RemoteServer, RemoteSession, Silent

_log = logging.getLogger(__name__)

RETURN_S = 10.0
"""How long a new session waits for a server to come back when all are out: restarting one takes seconds."""
PROBE_EVERY_S = 1.0
"""Seconds between two looks at a server that is out."""


class ServerPool:
    """Servers of one tool, any of which may open a session.

    Args:
        servers: at least one.
        key: what the configuration calls their addresses, for messages.
        retries: further rounds over all servers that are full.
    """

    def __init__(self, servers: Sequence[RemoteServer], key: str, retries: int) -> None:
        assert servers, "there is a server"
        self._servers = tuple(servers)
        self._key = key
        self._retries = retries
        self._out: dict[RemoteServer, str] = {}
        """Why, by server."""
        self._probes: dict[RemoteServer, asyncio.Task[None]] = {}
        self._back = asyncio.Event()

    async def open(self, episode_id: str) -> RemoteSession:
        """Open a session at the least loaded server; where that one fails, at the next.

        Raises:
            ToolFailure: no server opens one; with the addresses and the key to change.
            ConfigError: the token is refused.

        """
        words, wanted_s = "", 0.0
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(max(BACKOFF_S * 2 ** (attempt - 1), min(wanted_s, RETURN_S)))
                await self._one_is_up()
            tried: set[RemoteServer] = set()
            while left := [server for server in self._up() if server not in tried]:
                server = min(left, key=lambda one: one.load)
                tried.add(server)
                try:
                    return await self._open_at(server, episode_id)
                except Busy as busy:
                    words, wanted_s = f"{server.url}: {busy}", busy.retry_s
                except Silent as silent:
                    self.take_out(server, str(silent))
        if not self._up():
            raise self._all_out()
        raise ToolFailure(
            f"no tool server opens another session ({words}); raise its server.max_sessions, or lower rollout.concurrency"
        )

    async def _open_at(self, server: RemoteServer, episode_id: str) -> RemoteSession:
        server.load += 1  # at once: sessions that are opened at the same time spread, too
        try:
            return await server.open(episode_id)
        except BaseException:
            server.load -= 1
            raise

    def check(self, server: RemoteServer) -> None:
        """Refuse a call to a server that is out.

        Raises:
            ToolFailure: it is.

        """
        if server in self._out:
            raise ToolFailure(f"{server.named} was taken out: it does not answer ({self._out[server]})")

    def take_out(self, server: RemoteServer, why: str) -> None:
        """Give a server no more sessions until it answers again."""
        if server in self._out:
            return
        _log.warning("%s is taken out: it does not answer (%s)", server.named, why)
        self._out[server] = why
        self._back.clear()
        self._probes[server] = asyncio.create_task(self._probe(server), name=f"probe {server.url}")

    async def _probe(self, server: RemoteServer) -> None:
        while server in self._out:
            await asyncio.sleep(PROBE_EVERY_S)
            try:
                await server.instance()
            except (httpx.TransportError, AgentrlError) as error:
                self._out[server] = f"{type(error).__name__} {error}".rstrip()
            else:
                _log.warning("%s answers again and is taken back", server.named)
                del self._out[server]
                self._back.set()

    def _up(self) -> list[RemoteServer]:
        return [server for server in self._servers if server not in self._out]

    async def _one_is_up(self) -> None:
        if self._up():
            return
        try:
            async with asyncio.timeout(RETURN_S):
                while not self._up():
                    await self._back.wait()
        except TimeoutError:
            raise self._all_out() from None

    def _all_out(self) -> ToolFailure:
        faults = "; ".join(f"{server.url}: {why}" for server, why in self._out.items())
        return ToolFailure(f"no tool server answers ({faults}); start one there, or change {self._key}")

    async def aclose(self) -> None:
        """End the looks at servers that are out, and close all connections."""
        for probe in self._probes.values():
            probe.cancel()
        await asyncio.gather(*self._probes.values(), return_exceptions=True)
        await asyncio.gather(*(server.aclose() for server in self._servers))
