"""The engines that play past snapshots of the policy in self-play."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.inference.base import EngineControl
from agentrl.inference.fleet.fleet import Fleet
from agentrl.obs.waiting import waiting
from agentrl.selfplay.pool import step_of
from agentrl.weight_sync.adapter import load_adapters


@dataclass(slots=True)
class OpponentEngine:
    """A fleet of one engine, which plays one snapshot at a time."""

    fleet: Fleet
    folder: Path
    """Of all snapshots."""
    snapshot: str | None = None
    """Name of the snapshot that it holds, or loads."""
    policies: Sequence[str] = ()
    """With ``weights.adapters=only``: a snapshot has the adapters of each."""
    users: int = field(default=0, init=False)
    """Groups that play its snapshot."""
    _loaded: str | None = field(default=None, init=False)
    _loading: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def __post_init__(self) -> None:
        """Let the engine load its snapshot again after a restart."""
        self.fleet.set_weight_sync(self._load_into)

    async def load(self) -> None:
        """Load its snapshot, unless it is loaded.

        Raises:
            EngineError: the engine refuses it.

        """
        async with self._loading:
            if self._loaded != self.snapshot:
                for engine in self.fleet.live:  # a restarted engine loads it then
                    await self._load_into(engine)
                self._loaded = self.snapshot

    async def _load_into(self, engine: EngineControl) -> int:
        assert self.snapshot is not None, "it is chosen before the first request"
        version = step_of(self.snapshot)
        if self.policies:
            await load_adapters(engine, self.folder / self.snapshot, self.policies, version)
        else:
            await engine.updates.from_disk(self.folder / self.snapshot, version)
        return version


@dataclass(slots=True)
class SnapshotEngines:
    """Gives each user an engine with the snapshot that it asks for, in the order of requests.

    An engine changes its snapshot only when it has no user. So with more snapshots in play than engines, a user waits until
    those before it have ended.
    """

    engines: Sequence[OpponentEngine]
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held by the first user that waits."""
    _released: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    @asynccontextmanager
    async def holding(self, snapshot: str, others: Collection[str] = ()) -> AsyncIterator[Fleet]:
        """Give the body an engine that plays ``snapshot``.

        Args:
            snapshot: its name.
            others: snapshots that are used soon: engines that hold them change last.

        Raises:
            EngineError: the engine does not load it.

        """
        with waiting("engine of snapshot", snapshot):
            async with self._turn:
                while (engine := self._free(snapshot, others)) is None:
                    self._released.clear()
                    await self._released.wait()
                engine.users, engine.snapshot = engine.users + 1, snapshot
        try:
            await engine.load()
            yield engine.fleet
        finally:
            engine.users -= 1
            self._released.set()

    def _free(self, snapshot: str, others: Collection[str]) -> OpponentEngine | None:
        """Return the engine that holds a snapshot, or another that may change; None if all others are in use."""
        for engine in self.engines:
            if engine.snapshot == snapshot:
                return engine
        free = [engine for engine in self.engines if not engine.users]
        return min(free, key=lambda engine: engine.snapshot in others, default=None)
