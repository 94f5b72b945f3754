"""The engines of a fleet for processes that sample with them: sent by the process that controls them, received by the others."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from typing_extensions import override

from agentrl.core.errors import SamplerError
from agentrl.core.sampler import Sampler
from agentrl.core.types import Generation
from agentrl.inference.client.adapters import adapter_of
from agentrl.inference.client.engine_state import EngineState, FleetUpdate, RequestsInProgress
from agentrl.inference.client.generation import GenerationClient
from agentrl.inference.client.http import CONNECTION_ERRORS, EngineHttp, ErrorReply
from agentrl.inference.client.prefix_ages import BlockUse, block_use
from agentrl.inference.client.segments import Vocabulary
from agentrl.inference.fleet.router import RoutedSampler


class MirroredEngine(GenerationClient):
    """Samples with an engine that another process controls. Generations wait until that process allows them to start."""

    def __init__(self, state: EngineState, timeout_s: float, vocabulary: Vocabulary) -> None:
        super().__init__(EngineHttp(state.url, timeout_s), vocabulary)
        # An engine may still have the request of a process that was killed.
        self._numbers = itertools.count(secrets.randbelow(1 << 62))
        self._timeout_s = timeout_s
        self._state = state
        self._changed = asyncio.Event()
        """Set, and replaced by a new event, when the state changes."""
        self._aborts: dict[str, EngineHttp] = {}
        """By address."""
        self.block_uses: list[BlockUse] = []
        """Blocks of the prefix cache that replies since the last call have used, if the other process needs them."""

    def set_state(self, state: EngineState) -> None:
        """Take the engine's new state."""
        self._state = state
        self._http.url = state.url.rstrip("/")
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    @override
    def ready(self) -> bool:
        return self._state.ready

    @override
    async def wait_ready(self) -> None:
        while not self.ready:
            if self._state.unfit:
                raise SamplerError(self._state.unfit)
            await self._changed.wait()

    @override
    def adapter(self, policy: str) -> str | None:
        return adapter_of(self._state.adapters, policy, self._state.url)

    @override
    def _weights_owner(self) -> str:
        return self._state.weights_owner

    @override
    def _cache_key(self) -> str | None:
        return self._state.cache_key

    @override
    def _note_blocks(self, ids: Sequence[int], generation: Generation) -> None:
        if self._state.knows_ages and (use := block_use(ids, generation)) is not None:
            self.block_uses.append(use)

    @override
    async def abort(self, request_id: str) -> None:
        await self.abort_at(request_id, self._stop)

    async def _stop(self, rid: str) -> None:
        """Have all engines that may have a request end it.

        Raises:
            SamplerError: none accepts the abort.
        """
        results = await asyncio.gather(*(self._stop_at(url, rid) for url in self._state.abort_urls))
        faults = [fault for fault in results if fault]
        if faults and len(faults) == len(results):
            raise SamplerError(faults[0])

    async def _stop_at(self, url: str, rid: str) -> str:
        """Return why an engine does not accept the abort; empty if it does."""
        http = self._aborts.setdefault(url, EngineHttp(url, self._timeout_s))
        try:
            async with http.request("POST", "/abort_request", {"rid": rid}):
                return ""
        except (ErrorReply, *CONNECTION_ERRORS) as error:
            return f"the engine at {url} does not abort {rid}: {error}"

    async def aclose(self) -> None:
        """Close all connections."""
        for http in (self._http, *self._aborts.values()):
            await http.aclose()


SendUpdate = Callable[[FleetUpdate], Awaitable[Mapping[str, RequestsInProgress]]]
"""Sends an update to a process at once, and returns its requests by engine once it has it; nothing if it is gone."""


class FleetMirror:
    """Sends the engines of a fleet to processes, each with an equal share of the limits on requests.

    Args:
        sampler: has the engines that serve requests.
    """

    def __init__(self, sampler: RoutedSampler) -> None:
        self._sampler = sampler
        self.discarded_tokens = 0
        """Tokens of generations of these processes that began again after a pause."""
        self.on_demand: Callable[[], None] = lambda: None
        """Called when `has_requests` may have changed."""
        self._demanding = set[int]()
        """Processes that have requests."""
        self._processes: Sequence[SendUpdate] = ()
        self._sending = set[asyncio.Future[Mapping[str, RequestsInProgress]]]()
        sampler.on_change = self._send

    @property
    def has_requests(self) -> bool:
        """Whether one of the processes has requests, as far as they have reported them."""
        return bool(self._demanding)

    def set_demand(self, process: int, has_requests: bool) -> None:
        """Record whether a process has requests."""
        (self._demanding.add if has_requests else self._demanding.discard)(process)
        self.on_demand()

    def connect(self, processes: Sequence[SendUpdate]) -> None:
        """Send all updates to these processes, from now on."""
        self._processes = processes

    def state(self, number: int) -> FleetUpdate:
        """Return the engines as the process with this number, from 0, may use them."""
        engines = {}
        for name, slot in self._sampler.slots.items():
            assert isinstance(slot.sampler, GenerationClient), "a fleet has clients of engines"
            most = self._sampler.limit(slot)
            share = None if most is None else max(1, (most + number) // max(1, len(self._processes)))
            engines[name] = replace(slot.sampler.state(), max_running=share)
        return FleetUpdate(engines, self._sampler.failed)

    def _send(self) -> None:
        """Send the engines to all processes."""
        for number, send in enumerate(self._processes):
            sending = asyncio.ensure_future(send(self.state(number)))
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)

    def add_block_uses(self, uses: Mapping[str, Sequence[BlockUse]]) -> None:
        """Add what replies to these processes say of cached blocks, by engine."""
        for name, engine_uses in uses.items():
            slot = self._sampler.slots.get(name)
            if slot is not None and isinstance(slot.sampler, GenerationClient) and slot.sampler.prefix_ages is not None:
                for use in engine_uses:
                    slot.sampler.prefix_ages.add(use)

    async def publish(self, client: Sampler, *, pause: str | None = None, updated: bool = False) -> RequestsInProgress:
        """See `agentrl.inference.client.engine_state.EngineMirror`."""
        name = next((name for name, slot in self._sampler.slots.items() if slot.sampler is client), "")
        sends = [
            send(replace(self.state(number), engine=name, pause=pause, updated=updated))
            for number, send in enumerate(self._processes)
        ]
        requests = [reply[name] for reply in await asyncio.gather(*sends) if name in reply]
        return RequestsInProgress(
            sum(request.unanswered for request in requests), any(request.kept for request in requests)
        )


class MirroredFleet:
    """Samples with the engines of a fleet that another process controls.

    Args:
        timeout_s: ``sampler.request_timeout_s``.
        vocabulary: of the policy.
    """

    def __init__(self, timeout_s: float, vocabulary: Vocabulary) -> None:
        self.sampler = RoutedSampler()
        """Samples with all engines."""
        self._timeout_s, self._vocabulary = timeout_s, vocabulary
        self._engines: dict[str, MirroredEngine] = {}
        self._retired: list[MirroredEngine] = []

    @property
    def discarded_tokens(self) -> int:
        """Tokens of generations that began again after a pause."""
        return sum(engine.discarded_tokens for engine in (*self._engines.values(), *self._retired))

    def take_block_uses(self) -> dict[str, list[BlockUse]]:
        """Return `MirroredEngine.block_uses` since the last call, by engine."""
        uses = {name: engine.block_uses for name, engine in self._engines.items() if engine.block_uses}
        for name in uses:
            self._engines[name].block_uses = []
        return uses

    def receive(self, update: FleetUpdate) -> dict[str, RequestsInProgress]:
        """Take the engines of an update, and return the requests at each."""
        for name in self._engines.keys() - update.engines.keys():
            self.sampler.remove(name)
            self._retired.append(self._engines.pop(name))
        for name, state in update.engines.items():
            self._set(name, state)
        if update.failed is not None:
            self.sampler.fail(update.failed)
        if (engine := self._engines.get(update.engine)) is not None:
            if update.pause is not None:
                engine.note_pause(update.pause)
            if update.updated:
                engine.note_update()
        return {
            name: RequestsInProgress(engine.unanswered, engine.keeps_requests) for name, engine in self._engines.items()
        }

    def _set(self, name: str, state: EngineState) -> None:
        if (engine := self._engines.get(name)) is not None:
            engine.set_state(state)
            self.sampler.limit_engine(name, state.max_running)
        else:
            self._engines[name] = MirroredEngine(state, self._timeout_s, self._vocabulary)
            self.sampler.add(name, self._engines[name], state.max_running)

    async def aclose(self) -> None:
        """Close all connections."""
        for engine in (*self._engines.values(), *self._retired):
            await engine.aclose()
