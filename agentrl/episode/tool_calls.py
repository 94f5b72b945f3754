"""Running the tools of one episode."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from agentrl.core.errors import AgentrlError, EnvironmentFailure, SandboxFailure, ToolFailure
from agentrl.core.tool import Tool, ToolClient, unknown_tool
from agentrl.core.types import CallStatus, ToolCall, ToolResult, ToolStatus
from agentrl.obs.waiting import waiting

_log = logging.getLogger(__name__)


class ToolRunner:
    """Runs calls, those of one turn at the same time, and remembers which servers hold a session.

    Args:
        clients: by the registered name.
        episode_id: names the session to the servers.
        served: tools of those servers, by the tool's name.
    """

    def __init__(
        self, clients: Mapping[str, ToolClient], episode_id: str, served: Mapping[str, Tool] | None = None
    ) -> None:
        self._clients = clients
        self._episode_id = episode_id
        self._served = served or {}
        self._sessions: dict[str, ToolClient] = {}
        self._scored = 0
        self._closed = False
        self.seconds = 0.0
        """Spent in calls so far; those of one turn run at the same time, and count once."""

    async def asked(self, calls: Sequence[ToolCall], tools: Sequence[Tool] = ()) -> tuple[ToolResult, ...]:
        """Run calls that an environment (or a generate function) asked for: by the tool of that name in ``tools``,
        else by the registered one. Unknown names are answered as invalid.

        Raises:
            ToolFailure, SandboxFailure: a server failed, or a tool says that it did.
        """
        known = {tool.name: tool for tool in tools}

        async def run(call: ToolCall) -> ToolResult:
            tool = known.get(call.name) or self._served.get(call.name)
            if tool is not None:
                return await self._run(tool, call)
            if call.name in self._clients:
                return await self._remote(call.name, call)
            return _unknown(call, (*known, *self._served, *self._clients))

        return await self._timed(run, calls)

    async def local(self, calls: Sequence[ToolCall], tools: Sequence[Tool]) -> tuple[ToolResult, ...]:
        """Run calls that the policy made, by the tools that it was offered alone."""
        known = {tool.name: tool for tool in tools}

        async def run(call: ToolCall) -> ToolResult:
            if call.status is not CallStatus.OK:
                return ToolResult(call.id, ToolStatus.INVALID, call.fault)
            if call.name not in known:
                return _unknown(call, known)
            return await self._run(known[call.name], call)

        return await self._timed(run, calls)

    async def scoring(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Run a call of whoever scores the episode, in its sessions."""
        self._scored += 1
        (result,) = await self.asked((ToolCall(f"scoring-{self._scored}", name, arguments),))
        return result

    async def _timed(
        self, run: Callable[[ToolCall], Awaitable[ToolResult]], calls: Sequence[ToolCall]
    ) -> tuple[ToolResult, ...]:
        begun = time.monotonic()
        try:
            return await _all(run, calls)
        finally:
            self.seconds += time.monotonic() - begun

    async def _run(self, tool: Tool, call: ToolCall) -> ToolResult:
        return await (self._remote(tool.server, call) if tool.server else self._own(tool, call))

    async def _own(self, tool: Tool, call: ToolCall) -> ToolResult:
        with waiting("tool", call.name, f"call {call.id}", "in this process"):
            return _available(call, await tool.run(call))

    async def _remote(self, server: str, call: ToolCall) -> ToolResult:
        if self._closed:
            raise ToolFailure(f"tool {call.name!r}: the sessions of episode {self._episode_id} are closed")
        client = self._sessions[server] = client_of(self._clients, server, call.name)
        with waiting("tool", call.name, f"call {call.id}", f"server {server}"):
            return _available(call, await client.call(call, episode_id=self._episode_id))

    async def close(self) -> None:
        """End the episode's sessions. A server that cannot be told is only logged: the episode is over."""
        self._closed = True
        sessions, self._sessions = self._sessions, {}
        await asyncio.gather(*(self._end(name, client) for name, client in sessions.items()))

    async def _end(self, name: str, client: ToolClient) -> None:
        try:
            with waiting("end of the session", self._episode_id, f"server {name}"):
                await client.close_session(self._episode_id)
        except AgentrlError as error:
            _log.warning("tool %s: session %s was not closed: %s", name, self._episode_id, error)


def client_of(clients: Mapping[str, ToolClient], server: str, tool: str) -> ToolClient:
    """Return the client of a tool's server.

    Raises:
        EnvironmentFailure: the run has none, since the environment did not name it.
    """
    if server not in clients:
        raise EnvironmentFailure(
            f"tool {tool!r} belongs to the server of {server!r}, which this run has not started: put {server!r} into "
            f"tool_names of the environment (@uses_tools of a generate function); there are: {', '.join(clients) or 'none'}"
        )
    return clients[server]


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
    """Raise what is a failure of the infrastructure, whoever made the result: the policy has no part in it."""
    if result.status is ToolStatus.UNAVAILABLE:
        raise ToolFailure(f"tool {call.name!r} is unavailable: {result.content}")
    if result.status is ToolStatus.SANDBOX_FAILURE:
        raise SandboxFailure(f"tool {call.name!r}: {result.content}")
    return result
