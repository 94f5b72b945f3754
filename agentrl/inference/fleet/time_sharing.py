"""GPU time sharing of fleets: the policy's engines and those of judges, of which one fleet at a time holds memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Protocol

from agentrl.inference.base import EngineControl
from agentrl.inference.fleet.fleet import LiveEngines, call_live
from agentrl.obs.waiting import waiting

POLICY = "the policy"
"""Name of the policy's fleet."""
JUDGING, SWITCHES = "time/judging_s", "time/judge_switch_s"
"""Metrics: seconds in which judges hold the GPUs, and those of switches."""
_SECONDS = (JUDGING, SWITCHES)


class SharingFleet(LiveEngines, Protocol):
    """What time sharing needs of a `Fleet`, whose engines restore their weights."""

    @property
    def has_requests(self) -> bool:
        """Whether generations are in progress at the engines, or wait for them."""
        ...

    def on_demand(self, call: Callable[[], None]) -> None:
        """Call a function when `has_requests` may have changed."""
        ...

    def restart_in(self, context: AbstractAsyncContextManager[None]) -> None:
        """Restart engines only inside of a context."""
        ...

    async def start(self) -> None:
        """Start all engines."""
        ...

    async def wait_ended(self) -> None:
        """Wait until the processes of engines that are not live have ended."""
        ...


class EngineTimeSharing:
    """Lets one fleet at a time hold the memory of GPUs that fleets share: the policy's, and those of judges.

    Generations wait while their fleet has released its memory. The fleet that holds the GPUs keeps them as long as it has work:
    the policy's while episodes run, a judge's while it has requests. Then the next fleet that has work gets them, in the order of
    `fleets`. So all answers of a step are judged together, when its last episode has ended.

    An engine that was lost is restarted only while its fleet holds the GPUs.

    Args:
        policy: the engines that episodes sample with.
        judges: those of judges, by name.
    """

    def __init__(self, policy: SharingFleet, judges: Mapping[str, SharingFleet]) -> None:
        self.fleets: dict[str, SharingFleet] = {POLICY: policy, **judges}
        """By name, the policy's first."""
        self._gates = {name: _Gate() for name in self.fleets}
        """Each is open while engines of the fleet may be restarted."""
        self._holder: str | None = None
        """The fleet that holds memory; None: none does."""
        self._learner_has_gpus = False
        self._episodes = 0
        self._changed = asyncio.Event()
        self._switching = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._held_since = 0.0
        self._seconds = dict.fromkeys(_SECONDS, 0.0)
        for name, fleet in self.fleets.items():
            fleet.restart_in(_Restarts(self._gates[name]))
            fleet.on_demand(self._changed.set)

    async def start(self) -> None:
        """Start the fleets one after another, each on GPUs that those before it have left. All have released their memory then.

        Raises:
            EngineError: an engine does not start; the message has its last log lines.
        """
        for name, fleet in self.fleets.items():
            await fleet.start()
            await self._release(name)
        self._task = asyncio.create_task(self._serve(), name="GPU time sharing of engines")

    async def aclose(self) -> None:
        """End the switching. No fleet is changed."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def check(self) -> None:
        """Raise what a switch has failed with.

        Raises:
            EngineError: an engine that lives does not release or restore its memory, or no engine of a fleet is left.
        """
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    def add_episodes(self, count: int) -> None:
        """Count episodes that begin; a negative number are those that have ended, and may wait for a judge."""
        self._episodes += count
        self._changed.set()

    def policy_restarts(self, learner_lock: asyncio.Lock) -> AbstractAsyncContextManager[None]:
        """Return the context for restarts of the policy's engines that need the learner, too."""
        return _Restarts(self._gates[POLICY], learner_lock)

    async def give_to_policy(self) -> None:
        """Let the policy's engines have the GPUs now, such as for a weight sync.

        Raises:
            EngineError: see `check`.
        """
        async with self._switching:
            await self._switch(POLICY)

    async def give_to_learner(self) -> None:
        """Have all fleets release their memory until `return_from_learner`.

        Raises:
            EngineError: see `check`.
        """
        async with self._switching:
            self._learner_has_gpus = True
            await self._switch(None)

    async def return_from_learner(self) -> None:
        """Let the policy's engines be those that hold the GPUs: the learner has given them their memory."""
        async with self._switching:
            self._learner_has_gpus = False
            await self._switch(POLICY)
        self._changed.set()

    def metrics(self) -> dict[str, float]:
        """Return the seconds since the last call in which judges held the GPUs, and those of switches."""
        now = time.monotonic()
        if self._holder not in (None, POLICY):
            self._seconds[JUDGING] += now - self._held_since
            self._held_since = now
        seconds, self._seconds = self._seconds, dict.fromkeys(_SECONDS, 0.0)
        return seconds

    async def _serve(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            async with self._switching:
                if (name := self._next()) is not None:
                    await self._switch(name)

    def _next(self) -> str | None:
        """Return the fleet that gets the GPUs now; None: nothing changes."""
        if self._learner_has_gpus or (self._holder is not None and self._has_work(self._holder)):
            return None
        names: Sequence[str] = [*self.fleets]
        first = 0 if self._holder is None else names.index(self._holder)
        return next((name for name in (*names[first:], *names[:first]) if self._has_work(name)), None)

    def _has_work(self, name: str) -> bool:
        return self.fleets[name].has_requests or (name == POLICY and self._episodes > 0)

    async def _switch(self, name: str | None) -> None:
        if name == self._holder:
            return
        begun = time.monotonic()
        with waiting("GPUs", f"for {name or 'the learner'}", f"in turn with {self._holder or 'no engines'}"):
            if (holder := self._holder) is not None:
                if holder != POLICY:
                    self._seconds[JUDGING] += begun - self._held_since
                self._holder = None
                await self._release(holder)
            if name is not None:
                await self._resume(name)
                self._holder = name
        self._held_since = time.monotonic()
        self._seconds[SWITCHES] += self._held_since - begun

    async def _release(self, name: str) -> None:
        fleet = self.fleets[name]
        await self._gates[name].close()
        await call_live(fleet, _release_memory)
        await fleet.wait_ended()

    async def _resume(self, name: str) -> None:
        await call_live(self.fleets[name], _resume_memory)
        self._gates[name].open()


async def _release_memory(engine: EngineControl) -> None:
    await engine.memory.release()


async def _resume_memory(engine: EngineControl) -> None:
    await engine.memory.resume("weights")
    await engine.memory.resume("kv_cache")


class _Gate:
    """Lets restarts begin while it is open; `close` waits for those that have begun."""

    def __init__(self) -> None:
        self.opened, self.idle = asyncio.Event(), asyncio.Event()
        self.opened.set()
        self.idle.set()
        self.restarts = 0

    async def close(self) -> None:
        """Let no restart begin, and wait until none is in progress."""
        self.opened.clear()
        await self.idle.wait()

    def open(self) -> None:
        """Let restarts begin."""
        self.opened.set()


class _Restarts(AbstractAsyncContextManager[None]):
    """Context of a restart, which can be entered several times: a gate is open, and a lock is held, if there is one.

    It never waits for one while it keeps the other.
    """

    def __init__(self, gate: _Gate, lock: asyncio.Lock | None = None) -> None:
        self._gate, self._lock = gate, lock

    async def __aenter__(self) -> None:
        while True:
            await self._gate.opened.wait()
            if self._lock is not None:
                await self._lock.acquire()
            if self._gate.opened.is_set():
                break
            if self._lock is not None:
                self._lock.release()
        self._gate.restarts += 1
        self._gate.idle.clear()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gate.restarts -= 1
        if not self._gate.restarts:
            self._gate.idle.set()
        if self._lock is not None:
            self._lock.release()
