"""Past snapshots of the policy: their files in the run folder, and the engines that play them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.config.learner import LoraConfig
from agentrl.core.errors import CheckpointError
from agentrl.inference.base import EngineControl
from agentrl.inference.fleet.fleet import Fleet
from agentrl.learner.base import LearnerGroup
from agentrl.learner.checkpoints import complete_checkpoints, load_state
from agentrl.obs.waiting import waiting
from agentrl.self_play.league import snapshot_name, snapshot_step
from agentrl.weight_sync.adapter import load_adapters, write_adapters
from agentrl.weight_sync.disk import write_weights

SNAPSHOTS = "snapshots"
"""Folder in the run's folder."""


@dataclass(frozen=True, slots=True)
class SnapshotFolder:
    """``snapshots/`` of a run folder: a folder of weights for each snapshot."""

    run_folder: Path
    bucket_bytes: int = 1 << 20
    """Size of a file of weights."""
    dtype: str | None = None
    """Dtype of the written weights; None: the learner's."""
    lora: LoraConfig | None = None
    """With ``weights.adapters=only``: a snapshot has the adapters of each policy."""

    @property
    def path(self) -> Path:
        """Path of the folder."""
        return self.run_folder / SNAPSHOTS

    async def write(self, learner: LearnerGroup, step: int) -> None:
        """Write the policy after ``step``.

        Raises:
            LearnerError, OSError: it cannot be written.
        """
        folder = self.path / snapshot_name(step)
        if self.lora is None:
            await write_weights(learner, folder, bucket_bytes=self.bucket_bytes, dtype=self.dtype)
        else:
            await asyncio.to_thread(write_adapters, learner, folder, self.lora, self.dtype)

    async def load(self, engine: EngineControl, name: str) -> int:
        """Load a snapshot into an engine and return its step, which is the version of the engine's weights.

        Raises:
            EngineError: the engine refuses it.
        """
        version = snapshot_step(name)
        if self.lora is None:
            await engine.updates.from_disk(self.path / name, version)
        else:
            await load_adapters(engine, self.path / name, self.lora.policies, version)
        return version

    def remove_all_except(self, names: Collection[str]) -> None:
        """Remove snapshots, but those of ``names`` and those that a checkpoint needs to resume."""
        needed_names = set(names)
        for checkpoint in complete_checkpoints(self.run_folder / "checkpoints"):
            with suppress(CheckpointError):  # nothing can resume from a damaged one
                needed_names |= snapshots_in_state(load_state(checkpoint))
        for folder in self.path.iterdir():
            if folder.name not in needed_names:
                shutil.rmtree(folder)


def snapshots_in_state(state: Mapping[str, Any]) -> set[str]:
    """Return the names of the snapshots that a checkpoint's state needs."""
    steps = state.get("source", {}).get("self_play", {}).get("snapshots", ())
    return {snapshot_name(int(step)) for step in steps}


@dataclass(slots=True)
class OpponentEngine:
    """A fleet of one engine, which plays one snapshot at a time."""

    fleet: Fleet
    folder: SnapshotFolder
    snapshot: str | None = None
    """Name of the snapshot that the engine holds, or loads."""
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
        return await self.folder.load(engine, self.snapshot)


@dataclass(slots=True)
class SnapshotEngines:
    """Gives each user an engine with the requested snapshot, in the order of requests.

    An engine changes its snapshot only when it has no user. So with more snapshots in play than engines, a user waits until
    those before it have ended.
    """

    engines: Sequence[OpponentEngine]
    _next_user: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held by the first user that waits."""
    _released: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    @property
    def fleets(self) -> list[Fleet]:
        """Fleets of the engines."""
        return [engine.fleet for engine in self.engines]

    @asynccontextmanager
    async def engine_with(self, snapshot: str, used_soon: Collection[str] = ()) -> AsyncIterator[Fleet]:
        """Give the body an engine that plays ``snapshot``.

        Args:
            snapshot: its name.
            used_soon: snapshots whose engines change last.

        Raises:
            EngineError: the engine does not load it.
        """
        with waiting("engine of snapshot", snapshot):
            async with self._next_user:
                while (engine := self._find_engine(snapshot, used_soon)) is None:
                    self._released.clear()
                    await self._released.wait()
                engine.users, engine.snapshot = engine.users + 1, snapshot
        try:
            await engine.load()
            yield engine.fleet
        finally:
            engine.users -= 1
            self._released.set()

    def _find_engine(self, snapshot: str, used_soon: Collection[str]) -> OpponentEngine | None:
        """Return the engine that holds a snapshot, or another that may change; None if all the others are in use."""
        for engine in self.engines:
            if engine.snapshot == snapshot:
                return engine
        unused = [engine for engine in self.engines if not engine.users]
        return min(unused, key=lambda engine: engine.snapshot in used_soon, default=None)
