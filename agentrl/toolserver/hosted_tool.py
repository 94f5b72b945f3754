"""What a tool is to the server that hosts it: `HostedTool`, called in the session of an episode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from typing import Any

from agentrl.core.tool import Tool
from agentrl.core.types import ToolCall, ToolResult
from agentrl.sandbox.base import Sandbox


class ToolSession(ABC):
    """One episode at a server. All tools of the server share it, its sandbox among them."""

    id: str
    """Unique at the server."""
    state: dict[str, Any]
    """What tools remember from call to call, by the tool's name."""

    @abstractmethod
    async def sandbox(self) -> Sandbox:
        """Return the session's sandbox: opened at the first call, and anew once it is no longer alive.

        Raises:
            SandboxFailure: it could not be made.

        """

    @abstractmethod
    def fresh_sandbox(self) -> AbstractAsyncContextManager[Sandbox]:
        """Return a new sandbox that nothing of the episode has touched, for scoring; closed at the end of the block."""


class HostedTool(ABC):
    """A tool of a tool server. One object serves all sessions, several calls at the same time.

    Args:
        spec: name, description and schema as the policy reads them. The server checks arguments before `call`.
    """

    def __init__(self, spec: Tool) -> None:
        self.spec = spec

    async def start(self) -> None:  # noqa: B027  most tools need nothing
        """Get ready, before the server answers.

        Raises:
            ConfigError, MissingError: it cannot.

        """

    @abstractmethod
    async def call(self, session: ToolSession, call: ToolCall) -> ToolResult:
        """Run one call; it never comes twice. Faults of the call are results with a status.

        Raises:
            SandboxFailure: the sandbox failed for reasons of its own.
            ToolFailure: the tool did.

        """

    async def end(self, session: ToolSession) -> None:  # noqa: B027  most tools need nothing
        """Let go of what it keeps for a session, which is over: no call runs, and the sandbox is gone or about to be.

        Called once for every session of the server, called or not.
        """

    async def close(self) -> None:  # noqa: B027  most tools need nothing
        """Let go of what `start` made."""


class PlainTool(HostedTool):
    """An `agentrl.Tool` in a server: a coroutine that knows of no session."""

    async def call(self, session: ToolSession, call: ToolCall) -> ToolResult:
        """Run the coroutine within its time."""
        return await self.spec.run(call)
