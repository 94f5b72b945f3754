"""Running the tools of one episode."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from agentrl.errors import AgentrlError, ToolFailure
from agentrl.protocols import ToolClient
from agentrl.tool import Tool, unknown_tool
from agentrl.types import CallStatus, ToolCall, ToolResult, ToolStatus

_log = logging.getLogger(__name__)


class ToolRunner:
    """Runs calls, those of one turn at the same time, and remembers which servers hold a session.

    Args:
        clients: by the tool's name.
        episode_id: names the session to the servers.
    """

    def __init__(self, clients: Mapping[str, ToolClient], episode_id: str) -> None:
        self._clients = clients
        self._episode_id = episode_id
        self._sessions: dict[str, ToolClient] = {}

    async def asked(self, calls: Sequence[ToolCall], tools: Sequence[Tool] = ()) -> tuple[ToolResult, ...]:
        """Run calls that an environment (or a generate function) asked for: by the tool of that name in ``tools``,
        else by the registered one. Unknown names are answered as invalid.

        Raises:
            ToolFailure: a server failed, or a tool says that it is unavailable.
        """
        known = {tool.name: tool for tool in tools}

        async def run(call: ToolCall) -> ToolResult:
            own, client = known.get(call.name), self._clients.get(call.name)
            if own is not None:
                return _available(call, await own.run(call))
            if client is None:
                return _unknown(call, (*known, *self._clients))
            self._sessions[call.name] = client
            return _available(call, await client.call(call, episode_id=self._episode_id))

        return await _all(run, calls)

    async def local(self, calls: Sequence[ToolCall], tools: Sequence[Tool]) -> tuple[ToolResult, ...]:
        """Run calls that the policy made, by the environment's own tools alone."""
        known = {tool.name: tool for tool in tools}

        async def run(call: ToolCall) -> ToolResult:
            if call.status is not CallStatus.OK:
                return ToolResult(call.id, ToolStatus.INVALID, call.fault)
            if call.name not in known:
                return _unknown(call, known)
            return _available(call, await known[call.name].run(call))

        return await _all(run, calls)

    async def close(self) -> None:
        """End the episode's sessions. A server that cannot be told is only logged: the episode is over."""
        for name, client in self._sessions.items():
            try:
                await client.close_session(self._episode_id)
            except AgentrlError as error:
                _log.warning("tool %s: session %s was not closed: %s", name, self._episode_id, error)


async def _all(run: Callable[[ToolCall], Awaitable[ToolResult]], calls: Sequence[ToolCall]) -> tuple[ToolResult, ...]:
    if len(calls) == 1:
        return (await run(calls[0]),)
    results = await asyncio.gather(*(run(call) for call in calls), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return tuple(result for result in results if isinstance(result, ToolResult))


def _unknown(call: ToolCall, known: Iterable[str]) -> ToolResult:
    return ToolResult(call.id, ToolStatus.INVALID, unknown_tool(call.name, known))


def _available(call: ToolCall, result: ToolResult) -> ToolResult:
    if result.status is ToolStatus.UNAVAILABLE:
        raise ToolFailure(f"tool {call.name!r} is unavailable: {result.content}")
    return result
