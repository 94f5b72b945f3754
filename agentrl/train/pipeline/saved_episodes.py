"""States of episodes in progress on disk, from which a run resumes."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from agentrl.core.atomic_files import write_atomically
from agentrl.core.reading import reading
from agentrl.obs.journal import with_checksum, without_checksum

SHARE = 0.02
"""Most of the time of an event loop that goes into saving."""


@dataclass(slots=True)
class SavedEpisodes:
    """Saves episodes between two turns: each one after so many seconds, and all together within `SHARE` of the time.

    ::

        journal/episodes/00000047/        a folder for each group that is not finished, by position
          12%2F3%2F1.json                 the state of an episode, with a checksum, by its quoted ``rollout_id``
    """

    folder: Path
    every_s: float | None
    """Least seconds between two saves of an episode, and before its first; None: no episode is saved."""
    version: int
    """The newest policy version that a resumed run has: states with tokens of a newer one are not used."""
    clock: Callable[[], float] = time.monotonic
    saves: int = field(default=0, init=False)
    seconds: float = field(default=0.0, init=False)
    """Spent so far."""
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        """Begin to count the time."""
        self._began = self.clock()

    def __reduce__(self) -> tuple[Callable[..., SavedEpisodes], tuple[Path, float | None, int]]:
        """Let all groups of a runner process share the one of that process, and so its limit on the time."""
        return _saved_episodes, (self.folder, self.every_s, self.version)

    def keep(self, positions: Container[int]) -> None:
        """Remove the states of all groups but those at ``positions``."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if int(path.name) not in positions:
                shutil.rmtree(path)

    def find_mentioned(self, words: Collection[str]) -> set[str]:
        """Return those of some words that states have from which episodes can be resumed.

        Raises:
            ConfigError: a state is damaged.
        """
        mentioned: set[str] = set()
        for path in self.folder.glob("*/*.json"):
            if _read_state(path).version <= self.version:
                text = path.read_text()
                mentioned |= {word for word in words if word in text}
        return mentioned

    def remove(self, position: int) -> None:
        """Remove the states of a group."""
        shutil.rmtree(self._group(position), ignore_errors=True)

    def group_states(self, position: int) -> GroupStates:
        """Return the states of a group's episodes."""
        return GroupStates(self, self._group(position))

    def may_save(self, since: float) -> bool:
        """Return whether an episode may be saved whose last save, or beginning, was at ``since``."""
        time_s = self.clock()
        if self.every_s is None or time_s - since < self.every_s:
            return False
        return self.seconds <= SHARE * (time_s - self._began)

    def add(self, seconds: float) -> None:
        """Count a save."""
        self.saves, self.seconds = self.saves + 1, self.seconds + seconds

    def _group(self, position: int) -> Path:
        return self.folder / f"{position:08d}"


@dataclass(frozen=True, slots=True)
class _SavedState:
    """What is in the file of an episode."""

    task: str
    state: dict[str, Any]
    version: int
    """The newest policy version that sampled one of its tokens; -1 without any."""


def _read_state(path: Path) -> _SavedState:
    """Return what the file of an episode has.

    Raises:
        ConfigError: it is damaged.
    """
    with reading(path, "state of an episode"):
        data = json.loads(without_checksum(path.read_bytes().removesuffix(b"\n")))
        versions = [version for node in data["state"]["trajectory"]["nodes"] for version in node["versions"]]
        return _SavedState(data["task"], data["state"], max(versions, default=-1))


@cache
def _saved_episodes(folder: Path, every_s: float | None, version: int) -> SavedEpisodes:
    return SavedEpisodes(folder, every_s, version)


@dataclass(slots=True)
class GroupStates:
    """Implements `agentrl.episode.state.SavedStates` for a group."""

    all: SavedEpisodes
    folder: Path
    _saved: dict[str, float] = field(default_factory=dict, init=False)
    """When an episode began or was saved, on the clock."""

    def load(self, rollout_id: str, task_id: str) -> dict[str, Any] | None:
        """Return the saved state of an episode, or None if there is none, or one of another task or of a newer policy.

        Raises:
            ConfigError: it is damaged.
        """
        self._saved[rollout_id] = self.all.clock()
        path = self._file(rollout_id)
        if not path.exists():
            return None
        saved = _read_state(path)
        return saved.state if saved.task == task_id and saved.version <= self.all.version else None

    def discard(self, rollout_id: str) -> None:
        """Remove the state of an episode that begins again, or has ended."""
        self._file(rollout_id).unlink(missing_ok=True)

    def is_due(self, rollout_id: str) -> bool:
        """Return whether an episode is to be saved after its turn."""
        return self.all.may_save(self._saved[rollout_id])

    def save(self, rollout_id: str, task_id: str, state: Callable[[], dict[str, Any]]) -> None:
        """Write the state of an episode."""
        began = time.perf_counter()
        self.folder.mkdir(parents=True, exist_ok=True)
        with write_atomically(self._file(rollout_id)) as partial:
            # Not orjson: states of random generators have integers of 128 bits.
            partial.write_bytes(with_checksum(json.dumps({"task": task_id, "state": state()}).encode()))
        self.all.add(time.perf_counter() - began)
        self._saved[rollout_id] = self.all.clock()

    def _file(self, rollout_id: str) -> Path:
        return self.folder / f"{quote(rollout_id, safe='')}.json"
