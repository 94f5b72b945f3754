"""Hosted tools in this process, without a server but sandboxed: for scripted experts and tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import cache
from typing import Any, TypeVar

from agentrl.config.sandbox import SandboxConfig
from agentrl.config.toolserver import ToolServerConfig
from agentrl.core.errors import TaskError
from agentrl.core.types import ToolCall, ToolResult
from agentrl.toolserver.hosted_tool import HostedTool
from agentrl.toolserver.server.errors import ImageRefused
from agentrl.toolserver.server.session import Session
from agentrl.toolserver.server.sessions import Sessions

T = TypeVar("T")


class LocalToolClient:
    """Implements `agentrl.core.tool.ToolClient` on a thread with an event loop: it may be used in any other event loop.

    Nothing is opened before the first call. If the process ends without `aclose`, its sandboxes end with it, and files that
    they leave on the machine are removed by the next start of a backend of that kind.

    Args:
        tools: makes the tools, not started yet.
        sandbox: of the code that they run; None if they run none.
    """

    def __init__(self, tools: Callable[[], Sequence[HostedTool]], sandbox: SandboxConfig | None) -> None:
        self._tools = tools
        self._sandbox = sandbox
        self._exits = AsyncExitStack()
        self._sessions: Sessions | None = None
        self._opening = asyncio.Lock()
        self._session_ids: dict[str, str] = {}

    async def call(self, call: ToolCall, *, episode_id: str) -> ToolResult:
        """Run a call in the episode's session, which its first call opens.

        Raises:
            MissingError: this machine lacks what the sandbox backend needs.
            ConfigError: the tools cannot be used as configured.
        """
        return await _run(self._call(call, episode_id))

    async def open_session(self, episode_id: str, *, image: str) -> None:
        """Open the episode's session with sandboxes from ``image``, unless it is open.

        Raises:
            TaskError: ``sandbox.images`` does not allow the image.
            MissingError, ConfigError: see `call`.
        """
        try:
            await _run(self._session(episode_id, image))
        except ImageRefused as error:
            raise TaskError(str(error)) from None

    async def close_session(self, episode_id: str) -> None:
        """End the episode's session, if it has one: no later call sees anything of it."""
        await _run(self._close_session(episode_id))

    async def aclose(self) -> None:
        """Close all sessions and sandboxes; the next call opens new ones."""
        await _run(self._close())

    async def _call(self, call: ToolCall, episode_id: str) -> ToolResult:
        session = await self._session(episode_id)
        return (await session.call(call)).result

    async def _session(self, episode_id: str, image: str | None = None) -> Session:
        async with self._opening:
            if self._sessions is None:
                self._sessions = await self._open()
        session = await self._sessions.open(episode_id, image)
        self._session_ids[episode_id] = session.id
        return session

    async def _open(self) -> Sessions:
        from agentrl.toolserver.server.server import open_sessions

        config = ToolServerConfig() if self._sandbox is None else ToolServerConfig(sandbox=self._sandbox)
        opening = open_sessions(self._tools(), config, sandboxed=self._sandbox is not None)
        return await self._exits.enter_async_context(opening)

    async def _close_session(self, episode_id: str) -> None:
        session_id = self._session_ids.pop(episode_id, None)
        if session_id is not None and self._sessions is not None:
            await self._sessions.close(session_id)

    async def _close(self) -> None:
        session_ids, self._session_ids = self._session_ids, {}
        sessions, self._sessions = self._sessions, None
        if sessions is not None:
            for session_id in session_ids.values():
                await sessions.close(session_id)  # no other server continues with them
        await self._exits.aclose()


async def _run(work: Coroutine[Any, Any, T]) -> T:
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _loop()))


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of a thread that ends with the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="local-tools", daemon=True).start()
    return loop
