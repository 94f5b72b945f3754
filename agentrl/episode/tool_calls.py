"""Running the tool calls of one episode: in this process or at tool servers, with one judgement of what failed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from typing import Any

from agentrl.core.errors import AgentrlError, EnvironmentFailure, SandboxFailure, ToolFailure
from agentrl.core.task import Task
from agentrl.core.tool import (
    SandboxImageClient,
    SessionlessClient,
    Tool,
    ToolClient,
    unknown_tool_message,
    validate_call,
)
from agentrl.core.types import CallStatus, ToolCall, ToolResult, ToolStatus, ToolUse
from agentrl.episode.limits import EpisodeClock
from agentrl.obs.waiting import TOOL, waiting

_log = logging.getLogger(__name__)


class ToolRunner:
    """Runs calls, those of one turn concurrently, and remembers which servers hold a session.

    Args:
        clients: by the registered name.
        task: the episode's; it may name the image of the sandboxes.
        episode_id: names the session to the servers.
        served: tools of those servers, by the tool's name.
    """

    clock: EpisodeClock | None = None
    """Stopped while a server takes longer than the tool may."""

    def __init__(
        self, clients: Mapping[str, ToolClient], task: Task, episode_id: str, served: Mapping[str, Tool] | None = None
    ) -> None:
        self._clients = clients
        self.task = task
        """The episode's."""
        self._episode_id = episode_id
        self._served = served or {}
        self._sessions: dict[str, ToolClient] = {}
        self._thread_lock = asyncio.Lock()
        self._scoring_calls = 0
        self._closed = False
        self._exits = AsyncExitStack()
        self.seconds = 0.0
        """Wall time spent in calls so far; concurrent calls of a turn count once."""
        self.uses: dict[str, ToolUse] = {}
        """Calls so far, by the tool's name."""

    @property
    def has_sessions(self) -> bool:
        """Whether a server may hold something of the episode."""
        return any(
            not isinstance(client, SessionlessClient) or client.keeps_sessions for client in self._sessions.values()
        )

    async def run_policy_calls(self, calls: Sequence[ToolCall], tools: Sequence[Tool]) -> tuple[ToolResult, ...]:
        """Run calls of the policy by the tools that it was offered alone. `Renderer.parse` has checked the arguments.

        Raises:
            ToolFailure, SandboxFailure: the infrastructure failed, not the call.
            TaskError: the image that the task names is not allowed.
        """
        tools_by_name = {tool.name: tool for tool in tools}
        started = time.monotonic()
        try:
            if len(calls) == 1:
                return (await self._run_one(calls[0], tools_by_name),)
            # All of them end before the first error is raised: no call of the episode outlives its turn.
            results = await asyncio.gather(
                *(self._run_one(call, tools_by_name) for call in calls), return_exceptions=True
            )
        finally:
            self.seconds += time.monotonic() - started
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return tuple(result for result in results if isinstance(result, ToolResult))

    async def run_environment_calls(
        self, calls: Sequence[ToolCall], tools: Sequence[Tool] = ()
    ) -> tuple[ToolResult, ...]:
        """Run calls of an environment, a generate function or a reward function: by the tool of that name in ``tools``,
        otherwise by the registered one. Arguments of tools in this process are checked here, those of others by their server.

        Raises:
            ToolFailure, SandboxFailure, TaskError: see `run_policy_calls`.
        """
        registered = {name: Tool(name, "", {}, server=name) for name in self._clients}
        tools_by_name = {**registered, **self._served, **{tool.name: tool for tool in tools}}
        local_tools = {name: tool for name, tool in tools_by_name.items() if not tool.server}
        checked = [
            validate_call(call, [local_tools[call.name]]) if call.name in local_tools else call for call in calls
        ]
        return await self.run_policy_calls(checked, tuple(tools_by_name.values()))

    async def run_scoring_call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Run a call of the reward function in the episode's sessions."""
        self._scoring_calls += 1
        (result,) = await self.run_environment_calls((ToolCall(f"scoring-{self._scoring_calls}", name, arguments),))
        return result

    async def _run_one(self, call: ToolCall, tools: Mapping[str, Tool]) -> ToolResult:
        """Run a call and count it."""
        if call.name not in tools:
            return await self._answer(call, tools)
        use, started = self.uses.setdefault(call.name, ToolUse()), time.monotonic()
        use.calls += 1
        use.failed += 1
        try:
            result = await self._answer(call, tools)
        finally:
            use.seconds += time.monotonic() - started
        use.failed -= result.status in (ToolStatus.OK, ToolStatus.INVALID)
        return result

    async def _answer(self, call: ToolCall, tools: Mapping[str, Tool]) -> ToolResult:
        """Run a call. Only here are failures of the infrastructure separated from results of the call."""
        if call.status is not CallStatus.OK:
            return ToolResult(call.id, ToolStatus.INVALID, call.fault)
        if call.name not in tools:
            return ToolResult(call.id, ToolStatus.INVALID, unknown_tool_message(call.name, tools))
        tool = tools[call.name]
        if not tool.server:
            # Functions that run in threads run in the order of the calls, so that they may share state without locks.
            turn = self._thread_lock if tool.runs_in_thread else nullcontext()
            with waiting(TOOL, call.name, f"call {call.id}", "in this process"):
                async with turn:
                    result = await tool.run(call)
        elif self._closed:
            raise ToolFailure(f"tool {call.name!r}: the sessions of episode {self._episode_id} are closed")
        else:
            image = self.task.sandbox_image
            client = self._sessions[tool.server] = find_client(self._clients, tool.server, call.name)
            stopped = nullcontext() if self.clock is None else self.clock.pause(counted=tool.timeout_s)
            with stopped, waiting(TOOL, call.name, f"call {call.id}", f"server {tool.server}"):
                if image is not None and isinstance(client, SandboxImageClient):
                    await client.open_session(self._episode_id, image=image)
                result = await client.call(call, episode_id=self._episode_id)
        if result.status is ToolStatus.UNAVAILABLE:
            raise ToolFailure(f"tool {call.name!r} is unavailable: {result.content}")
        if result.status is ToolStatus.SANDBOX_FAILURE:
            raise SandboxFailure(f"tool {call.name!r}: {result.content}")
        return result

    def on_close(self, function: Callable[[], Awaitable[None]]) -> None:
        """Await ``function()`` when the sessions are closed: after the reward function."""
        self._exits.push_async_callback(function)

    async def close(self) -> None:
        """Close the episode's sessions, also if the caller is canceled meanwhile. Errors are only logged: the episode is over."""
        self._closed = True
        sessions, self._sessions = self._sessions, {}
        closes = (self._close_session(name, client) for name, client in sessions.items())
        closing = asyncio.gather(*closes, self._exits.aclose())
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing
            raise

    async def _close_session(self, name: str, client: ToolClient) -> None:
        try:
            with waiting("close of the session", self._episode_id, f"server {name}"):
                await client.close_session(self._episode_id)
        except AgentrlError as error:
            _log.warning("tool %s: session %s was not closed: %s", name, self._episode_id, error)


def find_client(clients: Mapping[str, ToolClient], server: str, tool: str) -> ToolClient:
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
