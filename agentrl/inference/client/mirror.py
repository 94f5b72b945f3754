"""Client of an engine that another process controls."""

from __future__ import annotations

import asyncio
import itertools
import os

from typing_extensions import override

from agentrl.core.errors import SamplerError
from agentrl.inference.client.adapters import adapter_of
from agentrl.inference.client.engine_state import EngineState
from agentrl.inference.client.generation import GenerationClient
from agentrl.inference.client.http import CONNECTION_ERRORS, EngineHttp, ErrorReply
from agentrl.inference.client.segments import Vocabulary


class MirroredEngine(GenerationClient):
    """Samples with an engine that another process controls. Generations wait until that process says that they may start."""

    def __init__(self, state: EngineState, timeout_s: float, vocabulary: Vocabulary) -> None:
        super().__init__(EngineHttp(state.url, timeout_s), vocabulary)
        # An engine may still have the request of a process that was killed.
        self._numbers = itertools.count(os.getpid() << 32)
        self._timeout_s = timeout_s
        self._state = state
        self._changed = asyncio.Event()
        """Set, and replaced by a new event, when the state changes."""
        self._aborts: dict[str, EngineHttp] = {}
        """By address."""

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
    def _cache_key(self) -> str | None:
        return self._state.cache_key

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
