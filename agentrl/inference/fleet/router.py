"""One sampler over several engines: assignment of sessions to engines, concurrency limits, retries on lost engines."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from agentrl.core.background import first_ended
from agentrl.core.errors import EngineLostError, SamplerError
from agentrl.core.sampler import Sampler
from agentrl.core.types import FinishReason, Generation, Prompt, SamplingParams
from agentrl.obs.waiting import waiting

if TYPE_CHECKING:
    from agentrl.inference.client.sglang_client import SGLangClient

_MAX_ATTEMPTS = 3
"""Engines that one request may lose: it may be what crashes them."""
_RETRY_DELAY_S = 0.5
"""Before a request is sent again: by then the health monitor has found a dead engine."""
_MOST_AHEAD = 8
"""Requests that an engine may have more than the one with the fewest, and still get a session whose prompt it has."""
_PROMPTS = 4096
"""Prompts whose engine is remembered."""


@dataclass(slots=True, eq=False)
class EngineSlot:
    """One engine of a `RoutedSampler`."""

    name: str
    sampler: Sampler
    running: int = 0
    """Requests at the engine now."""
    sessions: int = 0
    """Sessions whose prefix it may have cached."""
    waiting: list[tuple[int, _Request]] = field(default_factory=list)
    """Heap, by arrival, of requests whose session is bound to this engine."""
    timeouts: set[asyncio.Timeout] = field(default_factory=set)
    """Timeouts around its requests, to end them when it is removed."""
    max_running: int | None = None
    """Most requests at the engine; None: that of all engines."""
    removed: bool = False
    """It gets no more requests; its current ones move to other engines."""


@dataclass(slots=True, eq=False)
class _Request:
    """A generation in progress."""

    session_id: str
    prompt: Prompt
    policy: str
    aborted: bool = False
    grant: asyncio.Future[EngineSlot | None] | None = None
    """Set while it waits for an engine; results in the engine, or None for an abort."""
    slot: EngineSlot | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def prefix(self) -> int:
        """Hash of what an engine may have cached: the prompt, of this policy."""
        return hash((self.policy, self.prompt.token_ids))


class EngineRouter(Protocol):
    """Keeps the list of engines that get requests."""

    on_lost: Callable[[str], None]
    """Called with an engine's name when a request may have failed to reach it."""

    def add(self, name: str, sampler: SGLangClient) -> None:
        """Add an engine."""
        ...

    def remove(self, name: str) -> None:
        """Remove an engine; its requests move to others. Unknown names are ignored."""
        ...

    def fail(self, why: str) -> None:
        """Fail all requests, now and later: no engine is left."""
        ...


class RoutedSampler:
    """A `Sampler` over engines that are added and removed at run time.

    All turns of a session go to the engine that has its prefix cached, a new session to the engine with the fewest requests.
    If another session began with the same prompt, the new one follows it, unless that engine has 8 requests more: so an engine
    computes the prompt of a group once. Waiting requests are served in order of arrival, by any engine. A request whose engine
    is removed or cannot be reached is sent to another one from its start: nothing of the lost attempt is kept. Without engines
    requests wait for one, until `fail`.
    """

    def __init__(self, max_running: int | None = None) -> None:
        """Start without engines; each gets at most ``max_running`` concurrent requests (None: no limit)."""
        self.counts = Counter[str]()
        """Tokens so far: ``prompt`` of all prompts, ``cached`` of these in the engines' prefix caches, ``speculated`` sampled by
        speculative decoding; and ``verified`` forward passes that sampled these last."""
        self.on_lost: Callable[[str], None] = lambda name: None
        """Called with an engine's name when a request could not reach it."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when an engine or a limit has changed, and when all requests fail."""
        self.on_demand: Callable[[], None] = lambda: None
        """Called when the first request has begun, and when the last has ended: see `has_requests`."""
        self.slots: dict[str, EngineSlot] = {}
        """The engines by name."""
        self.failed: str | None = None
        """Why all requests fail; None: they do not."""
        self._max_running = max_running
        self._sessions: dict[str, EngineSlot] = {}
        self._prompts: dict[int, EngineSlot] = {}
        """The engine of the last session that began with a prompt, by `_Request.prefix`; the latest at the end."""
        self._requests: dict[str, _Request] = {}
        self._waiting: list[tuple[int, _Request]] = []
        """Heap, by arrival, of requests that any engine may serve."""
        self._arrivals = itertools.count()

    @property
    def has_requests(self) -> bool:
        """Whether generations are in progress, or wait for an engine."""
        return bool(self._requests)

    # Engines

    def add(self, name: str, sampler: Sampler, max_running: int | None = None) -> None:
        """Add an engine, with at most ``max_running`` concurrent requests; None: the limit of all engines."""
        assert name not in self.slots, name
        slot = self.slots[name] = EngineSlot(name, sampler, max_running=max_running)
        self._fill(slot)
        self.on_change()

    def remove(self, name: str) -> None:
        """Remove an engine; its requests move to others. Unknown names are ignored."""
        slot = self.slots.pop(name, None)
        if slot is None:
            return
        slot.removed = True
        self._sessions = {session: bound for session, bound in self._sessions.items() if bound is not slot}
        self._prompts = {prompt: last for prompt, last in self._prompts.items() if last is not slot}
        now = asyncio.get_running_loop().time()
        for timeout in slot.timeouts:
            timeout.reschedule(now)
        for entry in slot.waiting:
            heapq.heappush(self._waiting, entry)
        for remaining_slot in self.slots.values():
            self._fill(remaining_slot)
        self.on_change()

    def limit(self, slot: EngineSlot) -> int | None:
        """Return the most concurrent requests of an engine; None: there is no limit."""
        return self._max_running if slot.max_running is None else slot.max_running

    def limit_engine(self, name: str, max_running: int | None) -> None:
        """Change the limit of concurrent requests of one engine; None: that of all. Unknown names are ignored."""
        if (slot := self.slots.get(name)) is not None and slot.max_running != max_running:
            slot.max_running = max_running
            self._fill(slot)
            self.on_change()

    def set_max_running(self, max_running: int | None) -> None:
        """Change the limit of concurrent requests per engine; None: no limit."""
        self._max_running = max_running
        for slot in self.slots.values():
            self._fill(slot)
        self.on_change()

    def fail(self, why: str) -> None:
        """Fail all waiting and future requests: no engine is left."""
        self.failed = why
        self.on_change()
        for _, request in self._waiting:
            if request.grant is not None and not request.grant.done():
                request.grant.set_exception(SamplerError(why))

    # Sampler

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, session_id: str, request_id: str, policy: str = "main"
    ) -> Generation:
        """Sample one turn; see `agentrl.core.sampler.Sampler`.

        Raises:
            SamplerError: an engine refused, the request lost three engines, or no engine is left.
        """
        if request_id in self._requests:
            raise SamplerError(f"request_id={request_id!r} is already in progress")
        request = self._requests[request_id] = _Request(session_id, prompt, policy)
        if len(self._requests) == 1:
            self.on_demand()
        lost: Exception | None = None
        try:
            for _ in range(_MAX_ATTEMPTS):
                slot = await self._acquire(request)
                if slot is None:
                    return Generation((), (), FinishReason.ABORT, (), 0, request_id)
                timeout = asyncio.timeout(None)
                try:
                    async with timeout:
                        slot.timeouts.add(timeout)
                        try:
                            generation = await slot.sampler.generate(
                                prompt, params, session_id=session_id, request_id=request_id, policy=policy
                            )
                        finally:
                            slot.timeouts.discard(timeout)
                    self.counts.update(prompt=len(prompt.token_ids), cached=generation.cached_tokens)
                    if generation.verified:
                        self.counts.update(speculated=len(generation.token_ids), verified=generation.verified)
                    return generation
                except TimeoutError:
                    if not timeout.expired():
                        raise
                    lost = EngineLostError(f"{slot.name} was removed")
                except SamplerError as error:
                    if not slot.removed and not isinstance(error, EngineLostError):
                        raise
                    lost = error
                    self._unbind(session_id, slot)
                    self.on_lost(slot.name)
                finally:
                    self._release(slot, request)
                if not slot.removed:
                    await asyncio.sleep(_RETRY_DELAY_S)
            raise SamplerError(
                f"request {request_id} lost {_MAX_ATTEMPTS} engines, the last of them so: {lost}"
            ) from lost
        finally:
            del self._requests[request_id]
            request.ended.set()
            if not self._requests:
                self.on_demand()

    async def abort(self, request_id: str) -> None:
        """Abort a request and wait until its `generate` returns; unknown requests are ignored.

        Raises:
            SamplerError: its engine refuses.
        """
        request = self._requests.get(request_id)
        if request is None:
            return
        request.aborted = True
        if request.grant is not None and not request.grant.done():
            request.grant.set_result(None)
        slot = request.slot
        if slot is not None:
            await self._abort_at(slot, request_id, request.ended)
        await request.ended.wait()

    async def _abort_at(self, slot: EngineSlot, request_id: str, ended: asyncio.Event) -> None:
        """Abort at an engine, which may be lost meanwhile: then the request ends without its reply."""
        async with first_ended(slot.sampler.abort(request_id), ended.wait()) as (aborting, _):
            if aborting.done():
                try:
                    aborting.result()
                except SamplerError:
                    if not slot.removed:
                        raise

    async def close_session(self, session_id: str) -> None:
        """Unbind a session from its engine and close it there."""
        slot = self._sessions.get(session_id)
        if slot is not None:
            self._unbind(session_id, slot)
            await slot.sampler.close_session(session_id)

    # Assignment of engines to requests

    async def _acquire(self, request: _Request) -> EngineSlot | None:
        """Wait for an engine and return it, or None if the request is aborted."""
        while not request.aborted:
            slot = self._free_slot(request)
            if slot is None:
                slot = await self._wait_for_slot(request)
            else:
                self._assign(slot, request)
            if slot is None or not slot.removed:
                return slot
            self._release(slot, request)  # removed between the grant and now
        return None

    def _free_slot(self, request: _Request) -> EngineSlot | None:
        bound = self._sessions.get(request.session_id)
        if bound is not None:
            return bound if self._has_capacity(bound) else None
        free = [slot for slot in self.slots.values() if self._has_capacity(slot)]
        least = min(free, key=lambda slot: (slot.running, slot.sessions), default=None)
        last = self._prompts.get(request.prefix)
        if least is not None and last in free and last.running < least.running + _MOST_AHEAD:
            return last
        return least

    def _has_capacity(self, slot: EngineSlot) -> bool:
        most = self.limit(slot)
        return most is None or slot.running < most

    def _assign(self, slot: EngineSlot, request: _Request) -> None:
        slot.running += 1
        request.slot = slot
        if request.session_id not in self._sessions:
            self._sessions[request.session_id] = slot
            slot.sessions += 1
            prefix = request.prefix
            self._prompts.pop(prefix, None)
            self._prompts[prefix] = slot
            if len(self._prompts) > _PROMPTS:
                del self._prompts[next(iter(self._prompts))]

    async def _wait_for_slot(self, request: _Request) -> EngineSlot | None:
        if self.failed is not None:
            raise SamplerError(self.failed)
        bound = self._sessions.get(request.session_id)
        request.grant = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting if bound is None else bound.waiting, (next(self._arrivals), request))
        try:
            with waiting("engine", bound.name if bound is not None else "any", "for a free slot"):
                return await request.grant
        except asyncio.CancelledError:
            if request.slot is not None:
                self._release(request.slot, request)
            raise
        finally:
            request.grant = None

    def _release(self, slot: EngineSlot, request: _Request) -> None:
        request.slot = None
        slot.running -= 1
        if not slot.removed:
            self._fill(slot)

    def _unbind(self, session_id: str, slot: EngineSlot) -> None:
        if self._sessions.get(session_id) is slot:
            del self._sessions[session_id]
            slot.sessions -= 1

    def _fill(self, slot: EngineSlot) -> None:
        """Grant free capacity to the requests that have waited longest."""
        while self._has_capacity(slot):
            heap = min(slot.waiting, self._waiting, key=lambda heap: heap[0][0] if heap else float("inf"))
            if not heap:
                return
            entry = heapq.heappop(heap)
            request = entry[1]
            if request.grant is None or request.grant.done():
                continue  # aborted or cancelled meanwhile
            bound = self._sessions.get(request.session_id)
            if bound is not None and bound is not slot:  # its session was bound to another engine first
                heapq.heappush(bound.waiting, entry)
                self._fill(bound)
                continue
            self._assign(slot, request)
            request.grant.set_result(slot)
