"""The client of tool servers: one session an episode, opened at its first call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from agentrl.config.toolserver import ClientConfig
from agentrl.core.errors import AgentrlError, ConfigError, SandboxFailure, ToolFailure
from agentrl.core.tool import Tool
from agentrl.core.types import ToolCall, ToolResult
from agentrl.obs.waiting import waiting
from agentrl.toolserver.client.pool import ServerPool
from agentrl.toolserver.client.server import RemoteServer, RemoteSession, Silent

_log = logging.getLogger(__name__)

WAIT_S = 2.0
"""How long the end of an episode waits for its session's; what takes longer goes on beside the next episodes."""
LAST_S = 5.0
"""How long `ToolServerClient.aclose` waits for sessions to end."""


class ToolServerClient:
    """Implements `agentrl.core.tool.ToolClient`; belongs to the event loop that first calls it.

    A session stays with the server that opened it: its files are there. When that server dies, its episodes' calls fail.

    Args:
        urls: addresses separated by commas.
        config: timeouts, retries and token.
        key: what the configuration calls the addresses, for messages.
        tools: those that a policy may call there.

    Raises:
        ConfigError: an address is none.

    """

    def __init__(self, urls: str, config: ClientConfig, *, key: str, tools: Sequence[Tool] = ()) -> None:
        addresses = dict.fromkeys(url.strip().rstrip("/") for url in urls.split(",") if url.strip())
        if not addresses:
            raise ConfigError(f"{key}={urls!r}: there is no address in it")
        self._pool = ServerPool([RemoteServer(url, config, key, tools) for url in addresses], key, config.retries)
        self._sessions: dict[str, asyncio.Task[RemoteSession]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def call(self, call: ToolCall, *, episode_id: str) -> ToolResult:
        """Run one call in the episode's session.

        Raises:
            SandboxFailure: the sandbox failed, or the session is lost with its server's process.
            ToolFailure: the tool or its server failed, or no server answers.
            EnvironmentFailure: the episode has used the call id before, for another call.
            ConfigError: a server refuses our token, or has other tools.

        """
        session = await self._session(episode_id)
        self._pool.check(session.server)
        try:
            with waiting("tool server", session.server.url):
                return await session.server.call(session, call)
        except Silent as silent:
            self._pool.take_out(session.server, str(silent))
            raise ToolFailure(f"{session.server.named} does not answer: {silent}") from silent

    async def _session(self, episode_id: str) -> RemoteSession:
        """Return the episode's session; calls that come while it is opened wait for the same one."""
        opening = self._sessions.get(episode_id)
        if opening is None:
            opening = asyncio.create_task(self._pool.open(episode_id), name=f"open {episode_id}")
            self._sessions[episode_id] = opening
        try:
            if opening.done():
                return opening.result()
            with waiting("tool session", "that a server opens"):
                return await asyncio.shield(opening)
        except AgentrlError as error:
            if self._sessions.get(episode_id) is opening:
                del self._sessions[episode_id]
            raise type(error)(*error.args) from error  # each waiting call raises an error of its own

    async def close_session(self, episode_id: str) -> None:
        """End the episode's session, if it has one. A server that is slow to do so is not waited for."""
        opening = self._sessions.pop(episode_id, None)
        if opening is None:
            return
        ending = asyncio.create_task(self._end(opening), name=f"end {episode_id}")
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        await asyncio.wait({ending}, timeout=WAIT_S)

    async def _end(self, opening: asyncio.Task[RemoteSession]) -> None:
        # One that is still being opened has its place in the server's queue and gives it up as soon as it is its turn.
        try:
            session = await opening
        except AgentrlError:
            return  # there is none; whoever wanted it was told
        session.server.load -= 1
        try:
            self._pool.check(session.server)
            await session.server.end(session)
        except (ToolFailure, SandboxFailure) as error:
            _log.warning("session %s was not closed: %s", session.id, error)

    async def aclose(self) -> None:
        """End what sessions are left, and close all connections."""
        for episode_id in list(self._sessions):
            opening = self._sessions.pop(episode_id)
            self._ending.add(asyncio.create_task(self._end(opening)))
        if self._ending:
            _, late = await asyncio.wait(self._ending, timeout=LAST_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._pool.aclose()
