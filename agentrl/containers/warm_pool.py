"""Machines that are kept started for the next ones who open machines of the same spec."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from docker.errors import APIError

from agentrl.containers.machine import Machine
from agentrl.containers.spec import MachineSpec
from agentrl.core.errors import AgentrlError

_log = logging.getLogger(__name__)


class WarmPool:
    """At most ``size`` machines of the specs that were opened last.

    Args:
        size: 0 keeps none.
        make: returns a new machine, None if no daemon has a free place.
    """

    def __init__(self, size: int, make: Callable[[MachineSpec], Awaitable[Machine | None]]) -> None:
        self._size = size
        self._make = make
        self._machines: deque[Machine] = deque()
        self._recent: deque[str] = deque(maxlen=max(1, 2 * size))
        """Digests of the specs that were opened last."""
        self._refilling: asyncio.Task[None] | None = None

    def take(self, spec: MachineSpec) -> Machine | None:
        """Return a machine of a spec, which is no longer in the pool; None if there is none."""
        for machine in self._machines:
            if machine.spec == spec:
                self._machines.remove(machine)
                return machine
        return None

    async def evict(self) -> bool:
        """Close the oldest machine, so that its place is free; return False if there is none."""
        if not self._machines:
            return False
        await self._machines.popleft().close()
        return True

    def refill(self, spec: MachineSpec) -> None:
        """Make machines of a spec that was just opened, until the pool is full; returns at once."""
        if not self._size:
            return
        self._recent.append(spec.digest)
        if self._refilling is None or self._refilling.done():
            self._refilling = asyncio.create_task(self._refill(spec), name="warm-machines")

    async def wait_full(self) -> None:
        """Wait until the machines are there that are being made."""
        if self._refilling is not None:
            await self._refilling

    async def _refill(self, spec: MachineSpec) -> None:
        try:
            stale = [machine for machine in self._machines if machine.spec.digest not in self._recent]
            for machine in stale:
                self._machines.remove(machine)
                await machine.close()
            while len(self._machines) < self._size:
                if (warm_machine := await self._make(spec)) is None:
                    return
                self._machines.append(warm_machine)
        except (AgentrlError, APIError) as error:
            _log.warning("no warm machine of %s: %s", spec.image, error)

    async def close(self) -> None:
        """End the refilling. Machines in the pool are open machines of the owner, and closed with these."""
        if self._refilling is not None:
            self._refilling.cancel()
            await asyncio.gather(self._refilling, return_exceptions=True)
        self._machines.clear()
