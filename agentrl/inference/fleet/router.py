"""One sampler before several engines: who samples which turn, and what becomes of it when that engine is lost."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from agentrl.core.errors import EngineLostError, SamplerError
from agentrl.core.sampler import Sampler
from agentrl.core.types import FinishReason, Generation, Prompt, SamplingParams
from agentrl.obs.waiting import waiting

if TYPE_CHECKING:
    from agentrl.inference.client.sglang_client import SGLangClient

_MOST_LOST = 3
"""Engines that one request may lose: it might be what they die of."""
_PAUSE_S = 0.5
"""Before a request goes out again: whoever watches the engines has found by then that one has died."""


@dataclass(slots=True, eq=False)
class Lane:
    """The way to one engine."""

    name: str
    sampler: Sampler
    running: int = 0
    """Requests that the engine has now."""
    sessions: int = 0
    """Sessions whose prefix it may have."""
    waiting: list[tuple[int, _Request]] = field(default_factory=list)
    """Heap, by arrival, of requests whose session is here."""
    scopes: set[asyncio.Timeout] = field(default_factory=set)
    """What ends its requests."""
    out: bool = False
    """It takes no more requests; those that it had go to others."""


@dataclass(slots=True, eq=False)
class _Request:
    """A generation under way."""

    session_id: str
    aborted: bool = False
    place: asyncio.Future[Lane | None] | None = None
    """While it waits for a place: the lane, or None for an abort."""
    lane: Lane | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class EngineRouter(Protocol):
    """Knows which engines take part."""

    on_lost: Callable[[str], None]
    """Called with an engine's name when a request may have failed to reach it."""

    def add(self, name: str, sampler: SGLangClient) -> None:
        """Give requests to an engine from now on."""
        ...

    def remove(self, name: str) -> None:
        """Give no more requests to an engine; those that it has go to others. One that is out already stays so."""
        ...

    def fail(self, why: str) -> None:
        """Refuse all requests: no engine will ever be there again."""
        ...


class RoutedSampler:
    """A `Sampler` over engines that come and go.

    All turns of a session go to the engine that has its prefix, a new session to the engine with the fewest requests.
    Of requests that wait for a place the one that came first gets it. A request whose engine is taken out, or cannot be
    reached, goes to another as if it were new: nothing of the lost attempt is kept. With no engine left requests wait
    for one, until `fail`.
    """

    def __init__(self, max_running: int | None = None) -> None:
        """Begin without engines; each is given ``max_running`` requests at a time (None: all)."""
        self.prompt_tokens = 0
        """Tokens of all prompts that were continued."""
        self.cached_tokens = 0
        """Of these, those that the engines had in their prefix caches."""
        self.on_lost: Callable[[str], None] = lambda name: None
        """Called with an engine's name when a request could not reach it."""
        self._max_running = max_running
        self._lanes: dict[str, Lane] = {}
        self._sessions: dict[str, Lane] = {}
        self._requests: dict[str, _Request] = {}
        self._waiting: list[tuple[int, _Request]] = []
        """Heap, by arrival, of requests that any engine may take."""
        self._arrivals = itertools.count()
        self._failed: str | None = None

    # Engines

    def add(self, name: str, sampler: Sampler) -> None:
        """Give requests to an engine from now on."""
        assert name not in self._lanes, name
        lane = self._lanes[name] = Lane(name, sampler)
        self._fill(lane)

    def remove(self, name: str) -> None:
        """Give no more requests to an engine; those that it has go to others. One that is out already stays so."""
        lane = self._lanes.pop(name, None)
        if lane is None:
            return
        lane.out = True
        self._sessions = {session: its for session, its in self._sessions.items() if its is not lane}
        now = asyncio.get_running_loop().time()
        for scope in lane.scopes:
            scope.reschedule(now)
        for entry in lane.waiting:
            heapq.heappush(self._waiting, entry)
        for other in self._lanes.values():
            self._fill(other)

    def allow(self, max_running: int | None) -> None:
        """Give each engine so many requests at a time from now on."""
        self._max_running = max_running
        for lane in self._lanes.values():
            self._fill(lane)

    def fail(self, why: str) -> None:
        """Refuse all requests that wait, and all to come: no engine will ever be there again."""
        self._failed = why
        for _, request in self._waiting:
            if request.place is not None and not request.place.done():
                request.place.set_exception(SamplerError(why))

    # Sampler

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, session_id: str, request_id: str, policy: str = "main"
    ) -> Generation:
        """Sample one turn; see `agentrl.core.sampler.Sampler`.

        Raises:
            SamplerError: an engine refused, or the request lost three engines, or none is left.

        """
        if request_id in self._requests:
            raise SamplerError(f"request_id={request_id!r} is under way already")
        request = self._requests[request_id] = _Request(session_id)
        lost: Exception | None = None
        try:
            for _ in range(_MOST_LOST):
                lane = await self._enter(request)
                if lane is None:
                    return Generation((), (), FinishReason.ABORT, (), 0, request_id)
                scope = asyncio.timeout(None)
                try:
                    async with scope:
                        lane.scopes.add(scope)
                        try:
                            generation = await lane.sampler.generate(
                                prompt, params, session_id=session_id, request_id=request_id, policy=policy
                            )
                        finally:
                            lane.scopes.discard(scope)
                    self.prompt_tokens += len(prompt.token_ids)
                    self.cached_tokens += generation.cached_tokens
                    return generation
                except TimeoutError:
                    if not scope.expired():
                        raise
                    lost = EngineLostError(f"{lane.name} was taken out")
                except SamplerError as error:
                    if not lane.out and not isinstance(error, EngineLostError):
                        raise
                    lost = error
                    self._unbind(session_id, lane)
                    self.on_lost(lane.name)
                finally:
                    self._leave(lane, request)
                if not lane.out:
                    await asyncio.sleep(_PAUSE_S)
            raise SamplerError(f"request {request_id} lost {_MOST_LOST} engines, the last of them so: {lost}") from lost
        finally:
            del self._requests[request_id]
            request.ended.set()

    async def abort(self, request_id: str) -> None:
        """Stop a request and wait until its `generate` ends; one that is not under way is left alone.

        Raises:
            SamplerError: its engine refuses to.

        """
        request = self._requests.get(request_id)
        if request is None:
            return
        request.aborted = True
        if request.place is not None and not request.place.done():
            request.place.set_result(None)
        lane = request.lane
        if lane is not None:
            await self._abort_at(lane, request_id, request.ended)
        await request.ended.wait()

    async def _abort_at(self, lane: Lane, request_id: str, ended: asyncio.Event) -> None:
        """Abort at an engine, which may be lost while it is asked: then the request ends without it."""
        stopping = asyncio.ensure_future(lane.sampler.abort(request_id))
        ending = asyncio.ensure_future(ended.wait())
        try:
            await asyncio.wait({stopping, ending}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                try:
                    stopping.result()
                except SamplerError:
                    if not lane.out:
                        raise
        finally:
            stopping.cancel()
            ending.cancel()
            await asyncio.gather(stopping, ending, return_exceptions=True)

    async def close_session(self, session_id: str) -> None:
        """Forget which engine has the session's prefix, and tell the engine."""
        lane = self._sessions.get(session_id)
        if lane is not None:
            self._unbind(session_id, lane)
            await lane.sampler.close_session(session_id)

    # Places

    async def _enter(self, request: _Request) -> Lane | None:
        """Return the lane in which the request has a place now, or None once it is aborted."""
        while not request.aborted:
            lane = self._free_lane(request.session_id)
            if lane is None:
                lane = await self._wait(request)
            else:
                self._take(lane, request)
            if lane is None or not lane.out:
                return lane
            self._leave(lane, request)  # lost between the grant and now
        return None

    def _free_lane(self, session_id: str) -> Lane | None:
        bound = self._sessions.get(session_id)
        lanes = self._lanes.values() if bound is None else (bound,)
        free = [lane for lane in lanes if self._has_room(lane)]
        return min(free, key=lambda lane: (lane.running, lane.sessions), default=None)

    def _has_room(self, lane: Lane) -> bool:
        return self._max_running is None or lane.running < self._max_running

    def _take(self, lane: Lane, request: _Request) -> None:
        lane.running += 1
        request.lane = lane
        if request.session_id not in self._sessions:
            self._sessions[request.session_id] = lane
            lane.sessions += 1

    async def _wait(self, request: _Request) -> Lane | None:
        if self._failed is not None:
            raise SamplerError(self._failed)
        bound = self._sessions.get(request.session_id)
        request.place = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting if bound is None else bound.waiting, (next(self._arrivals), request))
        try:
            with waiting("engine", bound.name if bound is not None else "any", "for a free place"):
                return await request.place
        except asyncio.CancelledError:
            if request.lane is not None:
                self._leave(request.lane, request)
            raise
        finally:
            request.place = None

    def _leave(self, lane: Lane, request: _Request) -> None:
        request.lane = None
        lane.running -= 1
        if not lane.out:
            self._fill(lane)

    def _unbind(self, session_id: str, lane: Lane) -> None:
        if self._sessions.get(session_id) is lane:
            del self._sessions[session_id]
            lane.sessions -= 1

    def _fill(self, lane: Lane) -> None:
        """Give the lane's free places to who has waited longest."""
        while self._has_room(lane):
            heap = min(lane.waiting, self._waiting, key=lambda heap: heap[0][0] if heap else float("inf"))
            if not heap:
                return
            entry = heapq.heappop(heap)
            request = entry[1]
            if request.place is None or request.place.done():
                continue  # aborted or cancelled meanwhile
            bound = self._sessions.get(request.session_id)
            if bound is not None and bound is not lane:  # another request of its session was placed first
                heapq.heappush(bound.waiting, entry)
                self._fill(bound)
                continue
            self._take(lane, request)
            request.place.set_result(lane)
