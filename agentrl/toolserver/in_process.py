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
from agentrl.core.types import ToolCall, ToolResult
from agentrl.toolserver.hosted_tool import HostedTool
from agentrl.toolserver.server.session import Session
from agentrl.toolserver.server.sessions import Sessions

T = TypeVar("T")


class LocalTools:
    """Runs the calls of one episode after another, each episode in a separate session, on a thread with an event loop.

    Nothing is opened before the first call. If the process ends without `close`, its sandboxes end with it, and files that
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
        self._session: Session | None = None
        self._lock = threading.Lock()

    def __call__(self, call: ToolCall) -> ToolResult:
        """Run a call of the current episode. Not for use inside an event loop.

        Raises:
            MissingError: this machine lacks what the sandbox backend needs.
            ConfigError: the tools cannot be used as configured.

        """
        with self._lock:
            return _run(self._call(call))

    def end_episode(self) -> None:
        """End the session: the next call belongs to another episode, and sees nothing of this one."""
        with self._lock:
            if self._session is not None:
                _run(self._end())

    def close(self) -> None:
        """Close the session and all sandboxes; the next call opens new ones."""
        with self._lock:
            if self._sessions is not None:
                _run(self._close())

    async def _call(self, call: ToolCall) -> ToolResult:
        if self._sessions is None:
            self._sessions = await self._open()
        if self._session is None:
            self._session = await self._sessions.open()
        return (await self._session.call(call)).result

    async def _open(self) -> Sessions:
        from agentrl.toolserver.server.server import open_sessions

        config = ToolServerConfig() if self._sandbox is None else ToolServerConfig(sandbox=self._sandbox)
        opening = open_sessions(self._tools(), config, sandboxed=self._sandbox is not None)
        return await self._exits.enter_async_context(opening)

    async def _end(self) -> None:
        assert self._sessions is not None
        assert self._session is not None
        session, self._session = self._session, None
        await self._sessions.close(session.id)

    async def _close(self) -> None:
        self._session, self._sessions = None, None
        await self._exits.aclose()


def _run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, _loop()).result()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of a thread that ends with the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="local-tools", daemon=True).start()
    return loop
