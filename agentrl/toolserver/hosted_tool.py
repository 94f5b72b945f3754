"""A tool as its server sees it: `HostedTool`, called in the session of an episode, and `StatelessTool`, called in batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import SandboxFailure, ToolFailure
from agentrl.core.tool import Tool
from agentrl.core.types import ToolCall, ToolResult
from agentrl.core.user_code import as_future_error, await_user_code, user_error
from agentrl.sandbox.base import Sandbox
from agentrl.toolserver.batcher import Batcher

if TYPE_CHECKING:
    from starlette.routing import BaseRoute


class ToolSession(ABC):
    """One episode at a server, as tools see it. All tools of the server share it, its sandbox among them."""

    id: str
    """Unique at the server."""
    state: dict[str, Any]
    """What tools keep from call to call, by the tool's name."""
    server_stops: bool = False
    """Whether it ends because the server stops, and not because its client has closed it or is silent."""

    @abstractmethod
    async def sandbox(self) -> Sandbox:
        """Return the session's sandbox: opened at the first call, and again when it is no longer alive.

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
        """Prepare, before the server answers.

        Raises:
            ConfigError, MissingError: the tool cannot be used as configured.
        """

    @abstractmethod
    async def call(self, session: ToolSession, call: ToolCall) -> ToolResult:
        """Run one call; the server calls once for each call id. Faults of the call are results with a status.

        Raises:
            SandboxFailure: the sandbox failed, not the call.
            ToolFailure: the tool failed, not the call.
        """

    async def end(self, session: ToolSession) -> None:  # noqa: B027  most tools need nothing
        """Release what the tool keeps for a session that is over: no call runs, and the sandbox is gone or about to be.

        Called once for every session of the server, whether or not the tool was called in it.
        """

    async def close(self) -> None:  # noqa: B027  most tools need nothing
        """Release what `start` made."""

    def routes(self) -> Sequence[BaseRoute]:
        """Return further HTTP routes of the server, for clients with their own protocol; usually none."""
        return ()

    def health(self) -> Mapping[str, Any]:
        """Return fields to add to ``GET /health``; usually none."""
        return {}


class PlainTool(HostedTool):
    """An `agentrl.Tool` in a server: a function that knows of no session."""

    async def call(self, session: ToolSession, call: ToolCall) -> ToolResult:
        """Run the function within its time."""
        return await self.spec.run(call)


class StatelessTool(HostedTool):
    """A tool whose calls change nothing, so that they need no session and may be repeated.

    Calls that wait at the same time, of whatever sessions and clients, run as one batch.

    Args:
        spec: see `HostedTool`.
        max_batch: calls in the largest batch.
    """

    def __init__(self, spec: Tool, *, max_batch: int) -> None:
        super().__init__(spec)
        self._batcher = Batcher(self._run_batch, max_batch=max_batch, concurrent=1)

    @abstractmethod
    async def call_batch(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        """Run calls with checked arguments and return their results in order; one batch at a time.

        Raises:
            ToolFailure: the tool failed, not the calls.
        """

    async def call(self, session: ToolSession, call: ToolCall) -> ToolResult:
        """Run one call in the next batch."""
        return await self._batcher.submit(call)

    async def _run_batch(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult | Exception]:
        """Run a batch. If its code raises, it is run in halves, so that only the call that raises fails."""
        try:
            results = await await_user_code(self.call_batch(calls))
            if len(results) != len(calls):
                raise TypeError(
                    f"{self.spec.name}: call_batch got {len(calls)} calls and returned {len(results)} results"
                )
            return results
        except (ToolFailure, SandboxFailure) as failure:
            return [type(failure)(*failure.args) for _ in calls]
        except BaseException as caught:
            error = user_error(caught)
        if len(calls) > 1:
            middle = len(calls) // 2
            return [*await self._run_batch(calls[:middle]), *await self._run_batch(calls[middle:])]
        return [as_future_error(error)]

    async def close(self) -> None:
        """End the batch that runs."""
        await self._batcher.close(ToolFailure(f"{self.spec.name} was closed during the call"))
