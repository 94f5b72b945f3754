"""One episode at a tool server: its calls, each run once, and its sandbox."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agentrl.core.errors import SandboxFailure, ToolFailure
from agentrl.core.tool import unknown_tool_message
from agentrl.core.types import ToolCall, ToolResult, ToolStatus
from agentrl.core.user_code import await_user_code, describe, user_error
from agentrl.sandbox.base import Sandbox
from agentrl.toolserver.hosted_tool import HostedTool, StatelessTool, ToolSession
from agentrl.toolserver.server.errors import Draining
from agentrl.toolserver.server.idempotency import Answer, CallMemory
from agentrl.toolserver.server.metrics import UNKNOWN, Metrics
from agentrl.toolserver.server.task_images import TaskImages

_log = logging.getLogger(__name__)

END_S = 10.0
"""Seconds that a tool may take to end a call that is cancelled, and to release a session."""


@dataclass(frozen=True, slots=True)
class ServerResources:
    """The backends, tools, metrics and slots that all sessions of a server share."""

    images: TaskImages | None
    tools: Mapping[str, HostedTool]
    metrics: Metrics
    clock: Callable[[], float]
    call_slots: asyncio.Semaphore
    """Bounds the calls that use sandboxes at the same time."""
    open_slots: asyncio.Semaphore
    """Bounds the sandboxes that are opened at the same time: of hundreds at once none would be ready in time."""
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server is about to stop: no call is started any more."""


@dataclass(slots=True)
class _Lease:
    """Resources that a running call holds until it ends: the session's sandbox, and one of the server's call slots."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """The call's own tasks take them one after the other."""
    has_sandbox: bool = False
    has_slot: bool = False
    ended: bool = False


_lease: ContextVar[_Lease | None] = ContextVar("agentrl_lease", default=None)
"""Lease of the call that runs in this task and in the tasks that it starts."""


class Session(ToolSession):
    """One episode.

    A call's first use of a sandbox waits for two things, and has them until the call ends: the session's own sandbox,
    which no other call of the session may use meanwhile, and one of the server's few slots for calls that run code.

    Args:
        session_id: unique at the server.
        episode_id: the client's id of it; may be empty.
        shared: the server's tools, backends, metrics and slots.
        image: that of its sandboxes; None: that of ``sandbox.image``.
    """

    def __init__(self, session_id: str, episode_id: str, shared: ServerResources, image: str | None = None) -> None:
        self.id = session_id
        self.episode_id = episode_id
        self.state: dict[str, Any] = {}
        self._shared = shared
        self._image = image
        self._calls = CallMemory()
        self._running: dict[asyncio.Task[Answer], tuple[ToolCall, asyncio.Future[Answer]]] = {}
        self._sandbox: Sandbox | None = None
        self._sandbox_lock = asyncio.Lock()  # held by the call that uses the sandbox
        self._fresh_sandboxes = 0
        self._last_used = shared.clock()
        self._closing: asyncio.Task[None] | None = None

    @property
    def running(self) -> set[asyncio.Future[Answer]]:
        """The answers of calls that run."""
        return {answer for _, answer in self._running.values()}

    def idle_seconds(self) -> float:
        """Return the seconds since the last call; 0 while one runs."""
        return 0.0 if self._running else self._shared.clock() - self._last_used

    def touch(self) -> None:
        """Restart the idle time."""
        self._last_used = self._shared.clock()

    async def call(self, call: ToolCall) -> Answer:
        """Run a call, or wait for the answer of the earlier call with its id. It continues if the caller is cancelled.

        Raises:
            Conflict: the id belongs to another call, or to one whose answer is no longer kept.
            Draining: the server is about to stop; calls that were started before are still answered.
        """
        if self._shared.draining.is_set() and call.id not in self._calls:
            raise Draining("the server is about to stop and starts no call")
        self.touch()
        try:
            answer, new = self._calls.recall(call)
        except (ValueError, RecursionError) as error:
            fault = f"{call.name}: the call cannot be passed on: {error}"
            return Answer.from_result(ToolResult(call.id, ToolStatus.INVALID, _printable(fault)))
        if new:
            task = asyncio.create_task(self.run(call), name=f"call-{self.id}-{call.id}")
            self._running[task] = call, answer
            task.add_done_callback(partial(self._on_call_end, answer))
        return await asyncio.shield(answer)

    def _on_call_end(self, answer: asyncio.Future[Answer], task: asyncio.Task[Answer]) -> None:
        del self._running[task]
        self.touch()
        if not task.cancelled() and not answer.done():
            answer.set_result(task.result())

    async def run(self, call: ToolCall) -> Answer:
        """Check a call's arguments and run its tool, without looking at the call's id.

        Errors of the tool, of its sandbox and of its code are results: ``unavailable`` and ``sandbox_failure``.
        """
        metrics, tool = self._shared.metrics, self._shared.tools.get(call.name)
        label = call.name if tool is not None else UNKNOWN
        started = time.perf_counter()
        lease = _Lease()
        _lease.set(lease)
        with metrics.calls_running.track_inprogress():
            try:
                fault = (
                    unknown_tool_message(call.name, self._shared.tools)
                    if tool is None
                    else tool.spec.schema_fault(call.arguments)
                )
                if fault or tool is None:
                    answer = Answer.from_result(ToolResult(call.id, ToolStatus.INVALID, fault))
                else:
                    answer = _answer(call, await await_user_code(tool.call(self, tool.spec.with_integers(call))))
            except BaseException as error:
                answer = self._failure_answer(call, user_error(error))
            finally:
                self._end_lease(lease)
        metrics.call_seconds.labels(label).observe(time.perf_counter() - started)
        metrics.calls.labels(label, answer.status.value).inc()
        return answer

    async def run_many(self, tool: StatelessTool, calls: Sequence[ToolCall]) -> list[Answer]:
        """As `run`, for calls of a stateless tool: together, because a task for each costs more than a search."""
        started = time.perf_counter()
        answers: dict[int, Answer] = {}
        valid_indexes: list[int] = []
        for number, call in enumerate(calls):
            if fault := tool.spec.schema_fault(call.arguments):
                answers[number] = Answer.from_result(ToolResult(call.id, ToolStatus.INVALID, fault))
            else:
                valid_indexes.append(number)
        valid_calls = [tool.spec.with_integers(calls[number]) for number in valid_indexes]
        results = await asyncio.gather(*(tool.call(self, call) for call in valid_calls), return_exceptions=True)
        for number, call, result in zip(valid_indexes, valid_calls, results, strict=True):
            try:
                answers[number] = _answer(call, result)
            except BaseException as error:
                answers[number] = self._failure_answer(call, user_error(error))
        metrics, seconds = self._shared.metrics, time.perf_counter() - started
        observe = metrics.call_seconds.labels(tool.spec.name).observe
        for answer in answers.values():
            observe(seconds)
            metrics.calls.labels(tool.spec.name, answer.status.value).inc()
        return [answers[number] for number in range(len(calls))]

    def _failure_answer(self, call: ToolCall, error: BaseException) -> Answer:
        message = str(error)
        status = ToolStatus.SANDBOX_FAILURE if isinstance(error, SandboxFailure) else ToolStatus.UNAVAILABLE
        if isinstance(error, SandboxFailure | ToolFailure):
            _log.warning("session %s, call %s of %s: %s", self.id, call.id, call.name, error)
            if isinstance(error, SandboxFailure):
                self._shared.metrics.sandbox_failures.inc()
        else:  # a fault of the tool's code: the episode's failure policy decides, and the log has the traceback
            _log.error("session %s, call %s: the tool %s failed", self.id, call.id, call.name, exc_info=error)
            message = describe(error)
        return Answer.from_result(ToolResult(call.id, status, _printable(message)))

    async def sandbox(self) -> Sandbox:
        """Return the session's sandbox; until the call ends no other call of the session gets it."""
        lease = _current_lease()
        async with lease.lock:
            if not lease.has_sandbox:
                self._release_slot(lease)  # the call that has the sandbox may wait for a slot
                await self._sandbox_lock.acquire()
                lease.has_sandbox = True
            await self._open_or_replace_sandbox()  # before the slot: calls that have one need not wait until it is open
            await self._acquire_slot(lease)
            return await self._open_or_replace_sandbox()

    @asynccontextmanager
    async def fresh_sandbox(self) -> AsyncIterator[Sandbox]:
        """Yield a sandbox that nothing of the episode has touched."""
        lease = _current_lease()
        async with lease.lock:
            await self._acquire_slot(lease)
        self._fresh_sandboxes += 1
        sandbox = await self._open_sandbox(f"{self.id}-fresh-{self._fresh_sandboxes}")
        try:
            yield sandbox
        finally:
            await self._close_sandbox(sandbox)

    async def _acquire_slot(self, lease: _Lease) -> None:
        if not lease.has_slot:
            await self._shared.call_slots.acquire()
            lease.has_slot = True

    def _release_slot(self, lease: _Lease) -> None:
        if lease.has_slot:
            lease.has_slot = False
            self._shared.call_slots.release()

    def _end_lease(self, lease: _Lease) -> None:
        lease.ended = True
        self._release_slot(lease)
        if lease.has_sandbox:
            lease.has_sandbox = False
            self._sandbox_lock.release()

    async def _open_or_replace_sandbox(self) -> Sandbox:
        if self._sandbox is not None and not self._sandbox.alive:
            dead_sandbox, self._sandbox = self._sandbox, None
            await self._close_sandbox(dead_sandbox)
        if self._sandbox is None:
            self._sandbox = await self._open_sandbox(self.id)
        return self._sandbox

    async def _open_sandbox(self, name: str) -> Sandbox:
        if self._shared.images is None:
            raise RuntimeError(
                "a tool needs a sandbox at a server that has none; its service must set needs_sandbox = True"
            )
        backend = await self._shared.images.backend(self._image)
        async with self._shared.open_slots:
            started = time.perf_counter()
            sandbox = await backend.open(name)
        self._shared.metrics.sandbox_start_seconds.observe(time.perf_counter() - started)
        self._shared.metrics.sandboxes_open.inc()
        return sandbox

    async def _close_sandbox(self, sandbox: Sandbox) -> None:
        self._shared.metrics.sandboxes_open.dec()
        try:
            await sandbox.close()
        except Exception:  # the backend removes what is left at its next start
            _log.exception("session %s: sandbox %s could not be closed", self.id, sandbox.id)

    async def close(self, reason: str) -> None:
        """End the session: running calls are cancelled and answered as ``unavailable``. A second call waits for the first."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(reason), name=f"close-{self.id}")
        await asyncio.shield(self._closing)

    async def _close(self, reason: str) -> None:
        running = dict(self._running)
        for task, (call, answer) in running.items():
            if not answer.done():
                message = f"the session {reason} while the call ran"
                answer.set_result(Answer.from_result(ToolResult(call.id, ToolStatus.UNAVAILABLE, message)))
            task.cancel()
        if running:
            _, stuck = await asyncio.wait(running, timeout=END_S)
            for task in stuck:
                _log.error("session %s: %s does not end", self.id, task.get_name())
        for name, tool in self._shared.tools.items():
            try:
                async with asyncio.timeout(END_S):
                    await await_user_code(tool.end(self))
            except BaseException as error:  # TimeoutError too; the session ends all the same
                _log.error("session %s: the tool %s could not end it", self.id, name, exc_info=user_error(error))
        if self._sandbox is not None:
            await self._close_sandbox(self._sandbox)


def _answer(call: ToolCall, result: object) -> Answer:
    """Return a tool's result as the answer of a call; raise what it is in place of one."""
    if isinstance(result, BaseException):
        raise result
    if not isinstance(result, ToolResult) or result.call_id != call.id:
        raise TypeError(f"the tool answered call {call.id!r} with {result!r:.200}")
    return Answer.from_result(result)


def _current_lease() -> _Lease:
    lease = _lease.get()
    assert lease is not None, "sandboxes are for calls"
    assert not lease.ended, "the call has ended"
    return lease


def _printable(text: str) -> str:
    """Return a text without halves of characters, which no JSON can hold."""
    return text.encode(errors="replace").decode()
