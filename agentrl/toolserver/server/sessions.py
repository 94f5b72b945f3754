"""All sessions of a tool server: a bounded number, admitted first come first served, closed when idle."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentrl.config.toolserver import ServerConfig
from agentrl.core.errors import ConfigError
from agentrl.core.types import ToolCall
from agentrl.sandbox.base import SandboxBackend
from agentrl.toolserver import request_limits
from agentrl.toolserver.hosted_tool import HostedTool, StatelessTool
from agentrl.toolserver.server.errors import Draining, Full, NeedsSession, SessionGone, UnknownSession
from agentrl.toolserver.server.idempotency import Answer
from agentrl.toolserver.server.metrics import Metrics
from agentrl.toolserver.server.session import ServerResources, Session
from agentrl.toolserver.server.task_images import TaskImages

_log = logging.getLogger(__name__)

CALLS_PER_CORE = 8
"""Calls that may use sandboxes at the same time, if ``server.max_running`` is not set."""
OPENERS_PER_CORE = 2
"""Sandboxes that may be opened at the same time."""
REAP_EVERY_S = 15.0
"""The longest time between two searches for idle sessions."""


@dataclass(slots=True)
class _Waiter:
    """A session in the queue; several requests of one episode may wait for it."""

    episode_id: str
    image: str | None
    granted: asyncio.Future[Session] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    requests: int = 0
    taken: bool = False


class Sessions:
    """Opens, finds and closes sessions, and calls tools in them. Belongs to the event loop that first uses it.

    Args:
        backend: opens their sandboxes, started; None if no tool needs one.
        tools: started.
        config: the server section.
        metrics: of the server.
        clock: seconds, for the idle time.

    Raises:
        ConfigError: two tools have one name.
    """

    def __init__(
        self,
        backend: SandboxBackend | None,
        tools: Sequence[HostedTool],
        config: ServerConfig,
        *,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.instance = secrets.token_hex(8)
        """Random id of this server process: another one means that it was restarted and has lost its sessions."""
        self.tools = {tool.spec.name: tool for tool in tools}
        if len(self.tools) < len(tools):
            raise ConfigError(f"tools: two tools have one name: {', '.join(sorted(tool.spec.name for tool in tools))}")
        self.config = config
        self.metrics = metrics or Metrics()
        cores = len(os.sched_getaffinity(0))
        self._images = None if backend is None else TaskImages(backend)
        self._shared = ServerResources(
            self._images,
            self.tools,
            self.metrics,
            clock,
            asyncio.Semaphore(config.max_running or CALLS_PER_CORE * cores),
            asyncio.Semaphore(OPENERS_PER_CORE * cores),
        )
        self._stateless = Session("stateless", "", self._shared)
        self._open: dict[str, Session] = {}
        self._episodes: dict[str, Session] = {}
        self._closing: dict[asyncio.Task[None], Session] = {}
        self._gone: OrderedDict[str, str] = OrderedDict()
        self._queue: OrderedDict[str, _Waiter] = OrderedDict()
        self._reaper: asyncio.Task[None] | None = None
        self.metrics.sessions_open.set_function(lambda: len(self._open) + len(self._closing))
        self.metrics.sessions_waiting.set_function(lambda: len(self._queue))

    def __len__(self) -> int:
        """Return how many sessions are open."""
        return len(self._open)

    @property
    def waiting(self) -> int:
        """The length of the queue."""
        return len(self._queue)

    @property
    def draining(self) -> bool:
        """Whether the server is about to stop."""
        return self._shared.draining.is_set()

    def start(self) -> None:
        """Start to close idle sessions, until `stop`."""
        self._reaper = asyncio.create_task(self._reap_forever(), name="reap-sessions")

    async def open(self, episode_id: str = "", image: str | None = None) -> Session:
        """Return the episode's session, opened if need be; waits up to ``server.queue_timeout_s``, first come first served.

        Args:
            episode_id: the client's id of it; may be empty.
            image: that of its sandboxes, if the task names one. Sessions without sandboxes ignore it.

        Raises:
            Full: there was none in time.
            Draining: the server is about to stop.
            ImageRefused: ``sandbox.images`` does not allow the image.
        """
        session = self.open_now(episode_id, image)
        return session if session is not None else await self._wait(episode_id, image)

    def open_now(self, episode_id: str = "", image: str | None = None) -> Session | None:
        """As `open`, but return None instead of waiting.

        Raises:
            Draining, ImageRefused: see `open`.
        """
        if self.draining:
            raise Draining("the server is about to stop and opens no session")
        if self._images is not None and image is not None:
            self._images.check_allowed(image)
        session = self._episodes.get(episode_id) if episode_id else None
        if session is not None:
            session.touch()
            return session
        return self._new(episode_id, image) if self._has_room() else None

    def _has_room(self) -> bool:
        # A session that is being closed still has its sandbox; the bound holds for sandboxes too.
        return len(self._open) + len(self._closing) < self.config.max_sessions

    def _new(self, episode_id: str, image: str | None) -> Session:
        session = Session(secrets.token_hex(16), episode_id, self._shared, image)
        self._open[session.id] = session
        if episode_id:
            self._episodes[episode_id] = session
        return session

    async def _wait(self, episode_id: str, image: str | None) -> Session:
        key = episode_id or secrets.token_hex(8)
        waiter = self._queue.setdefault(key, _Waiter(episode_id, image))
        waiter.requests += 1
        try:
            async with asyncio.timeout(self.config.queue_timeout_s):
                session = await asyncio.shield(waiter.granted)
            waiter.taken = True
            return session
        except TimeoutError:
            raise Full(
                f"all {self.config.max_sessions} sessions (server.max_sessions) are taken, and none became free in "
                f"{self.config.queue_timeout_s:g} s (server.queue_timeout_s)"
            ) from None
        finally:
            waiter.requests -= 1
            if not waiter.requests and not waiter.taken:
                self._give_up(key, waiter)

    def _give_up(self, key: str, waiter: _Waiter) -> None:
        if self._queue.get(key) is waiter:
            del self._queue[key]
        elif waiter.granted.done() and waiter.granted.exception() is None:
            # It got its place in the moment in which the last request for it was cancelled.
            self._begin_close(waiter.granted.result(), "was given up by its client")

    def _admit(self) -> None:
        while self._queue and self._has_room():
            _, waiter = self._queue.popitem(last=False)
            waiter.granted.set_result(self._new(waiter.episode_id, waiter.image))

    def find(self, session_id: str) -> Session:
        """Return an open session.

        Raises:
            UnknownSession, SessionGone: no open session has this id.
        """
        session = self._open.get(session_id)
        if session is not None:
            return session
        reason = self._gone.get(session_id)
        if reason is not None:
            raise SessionGone(f"session {session_id} {reason}")
        raise UnknownSession(f"there is no session {session_id:.64} at this server")

    async def call_stateless(self, calls: Sequence[ToolCall]) -> list[Answer]:
        """Run calls of stateless tools, which belong to no session; the same call again runs again.

        Raises:
            NeedsSession: a tool is not stateless.
            Draining: the server is about to stop.
        """
        if self.draining:
            raise Draining("the server is about to stop and starts no call")
        by_tool: dict[str, list[int]] = {}
        for number, call in enumerate(calls):
            by_tool.setdefault(call.name, []).append(number)
        for name in by_tool:
            if name in self.tools and not isinstance(self.tools[name], StatelessTool):
                raise NeedsSession(f"tool {name!r} has state: open a session and call it there")
        answers: dict[int, Answer] = {}
        for name, numbers in by_tool.items():
            tool, tool_calls = self.tools.get(name), [calls[number] for number in numbers]
            if isinstance(tool, StatelessTool):
                tool_answers = await self._stateless.run_many(tool, tool_calls)
            else:  # an unknown tool
                tool_answers = [await self._stateless.run(call) for call in tool_calls]
            answers |= zip(numbers, tool_answers, strict=True)
        return [answers[number] for number in range(len(calls))]

    async def close(self, session_id: str) -> None:
        """End a session and its sandbox. A second call waits for the first.

        Raises:
            UnknownSession: there is no such session, as far as the server remembers.
        """
        session = self._open.get(session_id)
        if session is not None:
            await asyncio.shield(self._begin_close(session, "was closed by its client"))
            return
        for task, session in list(self._closing.items()):
            if session.id == session_id:
                await asyncio.shield(task)
                return
        if session_id not in self._gone:
            raise UnknownSession(f"there is no session {session_id:.64} at this server")

    def _begin_close(self, session: Session, reason: str) -> asyncio.Task[None]:
        """Remove a session, so that no further call reaches it, and close it."""
        del self._open[session.id]
        if self._episodes.get(session.episode_id) is session:
            del self._episodes[session.episode_id]
        self._gone[session.id] = reason
        while len(self._gone) > request_limits.CLOSED_SESSIONS:
            self._gone.popitem(last=False)
        task = asyncio.create_task(session.close(reason), name=f"closing-{session.id}")
        self._closing[task] = session
        task.add_done_callback(self._on_closed)
        return task

    def _on_closed(self, task: asyncio.Task[None]) -> None:
        del self._closing[task]
        self._admit()

    async def reap(self) -> int:
        """Close the sessions without a call for ``server.idle_timeout_s`` and return their number."""
        limit = self.config.idle_timeout_s
        idle = [session for session in self._open.values() if session.idle_seconds() >= limit]
        tasks = [self._begin_close(session, f"was closed after {limit:g} s without a call") for session in idle]
        self.metrics.sessions_reaped.inc(len(idle))
        await asyncio.gather(*tasks)
        return len(idle)

    async def _reap_forever(self) -> None:
        while True:
            await asyncio.sleep(min(REAP_EVERY_S, self.config.idle_timeout_s / 4))
            reaped = await self.reap()
            if reaped:
                _log.info("closed %d sessions without a call for %g s", reaped, self.config.idle_timeout_s)

    async def drain(self, seconds: float) -> None:
        """Accept no more sessions and calls, and wait up to ``seconds`` for the calls that run."""
        self._shared.draining.set()
        while self._queue:
            _, waiter = self._queue.popitem(last=False)
            waiter.granted.set_exception(Draining("the server is about to stop and opens no session"))
        running = [answer for session in self._open.values() for answer in session.running]
        if running:
            _log.info("waiting up to %g s for %d calls", seconds, len(running))
            await asyncio.wait(running, timeout=seconds)

    async def stop(self) -> None:
        """Close all sessions; none can be opened afterwards."""
        self._shared.draining.set()
        if self._reaper is not None:
            self._reaper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reaper
        for session in list(self._open.values()):
            session.server_stops = True
            self._begin_close(session, "was closed because the server stops")
        await asyncio.gather(*self._closing)
        if self._images is not None:
            await self._images.close()
