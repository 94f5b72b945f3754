"""One episode at a tool server: its calls, each run once, and its sandbox."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from agentrl.core.errors import SandboxFailure, ToolFailure
from agentrl.core.tool import unknown_tool
from agentrl.core.types import ToolCall, ToolResult, ToolStatus
from agentrl.sandbox.base import Sandbox, SandboxBackend
from agentrl.toolserver.hosted_tool import HostedTool, ToolSession
from agentrl.toolserver.server.idempotency import Answer, CallMemory
from agentrl.toolserver.server.metrics import UNKNOWN, Metrics

_log = logging.getLogger(__name__)

END_S = 10.0
"""Seconds that a tool may take to end a call that is cut off, and its part of a session."""


@dataclass(frozen=True, slots=True)
class SessionParts:
    """What all sessions of a server share."""

    backend: SandboxBackend | None
    tools: Mapping[str, HostedTool]
    metrics: Metrics
    clock: Callable[[], float]
    running: asyncio.Semaphore
    """Calls that may use sandboxes at the same time."""
    opening: asyncio.Semaphore
    """Sandboxes that may be made at the same time: of hundreds at once none would be ready in its time."""


class HostedSession:
    """One episode.

    Args:
        session_id: unique at the server.
        episode_id: the client's own name for it; may be empty.
        parts: what it shares with others.
    """

    def __init__(self, session_id: str, episode_id: str, parts: SessionParts) -> None:
        self.id = session_id
        self.episode_id = episode_id
        self.state: dict[str, Any] = {}
        self.turn = asyncio.Lock()
        """Held by the call that uses the sandbox."""
        self._parts = parts
        self._calls = CallMemory()
        self._running: dict[asyncio.Task[None], tuple[ToolCall, asyncio.Future[Answer]]] = {}
        self._sandbox: Sandbox | None = None
        self._fresh = 0
        self._used = parts.clock()
        self._closed: asyncio.Task[None] | None = None

    @property
    def running(self) -> set[asyncio.Future[Answer]]:
        """The answers that calls still owe."""
        return {answer for _, answer in self._running.values()}

    def idle_seconds(self) -> float:
        """Return how long nobody has called; 0 while a call runs."""
        return 0.0 if self._running else self._parts.clock() - self._used

    def touch(self) -> None:
        """Note that the session is wanted."""
        self._used = self._parts.clock()

    def remembers(self, call_id: str) -> bool:
        """Return whether a call of that id was begun."""
        return call_id in self._calls

    async def call(self, call: ToolCall) -> Answer:
        """Return what a call comes to. One with the id of an earlier call gets that one's answer, once it is there.

        The call runs on by itself where the caller gives up waiting.

        Raises:
            Conflict: the id is that of another call, or of one whose answer is no longer kept.

        """
        self.touch()
        try:
            answer, new = self._calls.recall(call)
        except ValueError as error:  # half a character, or a number such as NaN
            fault = f"{call.name}: the call cannot be passed on: {error}"
            return Answer.of(ToolResult(call.id, ToolStatus.INVALID, _printable(fault)))
        if new:
            task = asyncio.create_task(self._run(call, answer), name=f"call-{self.id}-{call.id}")
            self._running[task] = call, answer
            task.add_done_callback(self._ended)
        return await asyncio.shield(answer)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self.touch()

    async def _run(self, call: ToolCall, future: asyncio.Future[Answer]) -> None:
        metrics, known = self._parts.metrics, self._parts.tools.get(call.name)
        label = call.name if known is not None else UNKNOWN
        started = time.perf_counter()
        with metrics.calls_running.track_inprogress():
            if known is None:
                answer = Answer.of(ToolResult(call.id, ToolStatus.INVALID, unknown_tool(call.name, self._parts.tools)))
            else:
                answer = await self._answer(known, call)
        metrics.call_seconds.labels(label).observe(time.perf_counter() - started)
        metrics.calls.labels(label, answer.result.status.value).inc()
        if not future.done():
            future.set_result(answer)

    async def _answer(self, tool: HostedTool, call: ToolCall) -> Answer:
        turn = _Turn(self, self._parts.running)
        try:
            fault = tool.spec.fault_of(call.arguments)
            if fault:
                return Answer.of(ToolResult(call.id, ToolStatus.INVALID, fault))
            result = await tool.call(turn, call)
            if not isinstance(result, ToolResult) or result.call_id != call.id:
                raise TypeError(f"the tool answered call {call.id!r} with {result!r:.200}")
            return Answer.of(result)
        except SandboxFailure as error:
            _log.warning("session %s, call %s of %s: %s", self.id, call.id, call.name, error)
            self._parts.metrics.sandbox_failures.inc()
            status, said = ToolStatus.SANDBOX_FAILURE, str(error)
        except ToolFailure as error:
            _log.warning("session %s, call %s of %s: %s", self.id, call.id, call.name, error)
            status, said = ToolStatus.UNAVAILABLE, str(error)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the session was closed
            # A fault of the tool's code: the episode's failure policy decides, and the log has it all.
            _log.exception("session %s, call %s: the tool %s failed", self.id, call.id, call.name)
            status, said = ToolStatus.UNAVAILABLE, f"{type(error).__name__}: {error}"
        finally:
            turn.end()
        return Answer.of(ToolResult(call.id, status, _printable(said)))

    async def own_sandbox(self) -> Sandbox:
        """Return the living sandbox of the session; only the call that has the turn may ask."""
        assert self.turn.locked()
        if self._sandbox is not None and not self._sandbox.alive:
            dead, self._sandbox = self._sandbox, None
            await self._end_sandbox(dead)
        if self._sandbox is None:
            self._sandbox = await self._open_sandbox(self.id)
        return self._sandbox

    @asynccontextmanager
    async def fresh_sandbox(self) -> AsyncIterator[Sandbox]:
        """Yield a sandbox of its own for scoring."""
        self._fresh += 1
        sandbox = await self._open_sandbox(f"{self.id}-fresh-{self._fresh}")
        try:
            yield sandbox
        finally:
            await self._end_sandbox(sandbox)

    async def _open_sandbox(self, name: str) -> Sandbox:
        if self._parts.backend is None:
            raise RuntimeError(
                "a tool asked for a sandbox at a server that has none; its service must say needs_sandbox = True"
            )
        async with self._parts.opening:
            started = time.perf_counter()
            sandbox = await self._parts.backend.open(name)
        self._parts.metrics.sandbox_start_seconds.observe(time.perf_counter() - started)
        self._parts.metrics.sandboxes_open.inc()
        return sandbox

    async def _end_sandbox(self, sandbox: Sandbox) -> None:
        self._parts.metrics.sandboxes_open.dec()
        try:
            await sandbox.close()
        except Exception:  # whoever closes a session can do nothing about it; the backend looks again at the next start
            _log.exception("session %s: sandbox %s could not be closed", self.id, sandbox.id)

    async def close(self, why: str) -> None:
        """End the session: calls that run are cut off and answered with ``unavailable``. A second call waits for the first."""
        if self._closed is None:
            self._closed = asyncio.create_task(self._close(why), name=f"close-{self.id}")
        await asyncio.shield(self._closed)

    async def _close(self, why: str) -> None:
        running = dict(self._running)
        for task, (call, answer) in running.items():
            if not answer.done():
                said = f"the session {why} while the call ran"
                answer.set_result(Answer.of(ToolResult(call.id, ToolStatus.UNAVAILABLE, said)))
            task.cancel()
        if running:
            _, stuck = await asyncio.wait(running, timeout=END_S)
            for task in stuck:
                _log.error("session %s: %s does not end", self.id, task.get_name())
        await self._end_tools()
        if self._sandbox is not None:
            await self._end_sandbox(self._sandbox)

    async def _end_tools(self) -> None:
        over = _Turn(self, self._parts.running)
        over.end()
        for name, tool in self._parts.tools.items():
            try:
                async with asyncio.timeout(END_S):
                    await tool.end(over)
            except Exception:  # TimeoutError too; whoever closes a session can do nothing about it
                _log.exception("session %s: the tool %s could not end it", self.id, name)


class _Turn(ToolSession):
    """The session as one call sees it. The call's first use of a sandbox waits for its turn, which it has until it ends.

    There are two things to wait for: the session's own sandbox, which no other call of the session may use meanwhile,
    and one of the server's few places for calls that run code.
    """

    def __init__(self, session: HostedSession, places: asyncio.Semaphore) -> None:
        self.id = session.id
        self.state = session.state
        self._session = session
        self._places = places
        self._asking = asyncio.Lock()
        self._has_sandbox = False
        self._has_place = False
        self._over = False

    async def sandbox(self) -> Sandbox:
        """Return the session's sandbox; until the call ends no other call of the session gets it."""
        async with self._asking:
            if not self._has_sandbox:
                self._leave_place()  # who has it may wait for a place
                await self._session.turn.acquire()
                self._has_sandbox = True
            await self._session.own_sandbox()  # before the place: those who have one need not wait for its making
            await self._take_place()
            return await self._session.own_sandbox()

    @asynccontextmanager
    async def fresh_sandbox(self) -> AsyncIterator[Sandbox]:
        """Yield a sandbox that nothing of the episode has touched."""
        async with self._asking:
            await self._take_place()
        async with self._session.fresh_sandbox() as sandbox:
            yield sandbox

    async def _take_place(self) -> None:
        assert not self._over, "the call has ended, and its turn with it"
        if not self._has_place:
            await self._places.acquire()
            self._has_place = True

    def _leave_place(self) -> None:
        if self._has_place:
            self._has_place = False
            self._places.release()

    def end(self) -> None:
        """Let the next call have the sandbox, and the place."""
        self._over = True
        self._leave_place()
        if self._has_sandbox:
            self._has_sandbox = False
            self._session.turn.release()


def _printable(text: str) -> str:
    """Return a text without halves of characters, which no JSON can hold."""
    return text.encode(errors="replace").decode()
