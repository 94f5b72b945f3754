"""The runs under a folder, and what of each was read."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config.layers import CONFIG
from agentrl.config.secret_values import redact
from agentrl.config.yaml_text import parse_yaml
from agentrl.core.errors import ConfigError, UserError
from agentrl.core.extras import missing_extra_error
from agentrl.core.reading import reading
from agentrl.dashboard.metrics_file import MetricsFile
from agentrl.dashboard.rollout_index import RolloutIndex
from agentrl.dashboard.token_decoder import load_decode
from agentrl.dashboard.tool_calls import load_format
from agentrl.obs.run_end import RunEnd, read_end
from agentrl.obs.viewer.page import Decode
from agentrl.obs.viewer.run_files import RunFiles
from agentrl.runtime.run_dir import LOCK, LockHolder, lock_holder

if TYPE_CHECKING:
    from agentrl.render.renderer import ChatRenderer

DEPTH = 4
"""Folders below the one that is served in which runs are looked for."""
MOST_FOLDERS = 20_000
"""Folders that are looked at."""
LISTED_S = 2.0
"""Seconds for which the list of runs is kept."""
HELD_S = 3.0
"""Seconds for which it is kept whether the process of a run is alive: a look at its lock may refuse a run that starts then."""
_OWN = frozenset(("rollouts", "checkpoints", "logs", "journal", "traces", "tensorboard", "wandb", "__pycache__"))
"""Folders of a run that hold no run."""
HERE = "."
"""Name of a run whose folder is served itself."""


class DashboardRun:
    """A run: its folder, and what was read of it. Files that are missing, cut or damaged are no error.

    Args:
        name: its path under the folder that is served; `HERE` for the folder itself.
        folder: of the run.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.metrics = MetricsFile(folder / "metrics.jsonl")
        self.rollouts = RolloutIndex(folder)
        self._lock = threading.Lock()
        self._config: tuple[int, dict[str, Any]] = (-1, {})
        self._holder: tuple[float, LockHolder | None] = (-HELD_S, None)
        self._decode: Decode | str | None = None
        self._format_lock = threading.Lock()
        self._format: ChatRenderer | str | None = None

    @property
    def config(self) -> dict[str, Any]:
        """``config.yaml`` without secrets; empty if there is none, or it cannot be read."""
        path = self.folder / CONFIG
        changed_at = _changed_at(path)
        if changed_at != self._config[0]:
            config: object = {}
            try:
                with reading(path, "configuration of a run"):
                    config = parse_yaml(path.read_text(encoding="utf-8"), str(path)) if changed_at else {}
            except UserError:
                pass  # it is being written, or damaged: the advice says so
            self._config = (changed_at, redact(config) if isinstance(config, dict) else {})
        return self._config[1]

    @property
    def holder(self) -> LockHolder | None:
        """The process that runs, or ran."""
        with self._lock:
            looked_at, holder = self._holder
            if time.monotonic() - looked_at > HELD_S:
                holder = lock_holder(self.folder)
                self._holder = (time.monotonic(), holder)
            return holder

    @property
    def end(self) -> RunEnd | None:
        """How it ended; None if it has not, was killed, or the record is damaged."""
        try:
            return read_end(self.folder)
        except ConfigError:
            return None

    def state(self) -> str:
        """Return ``running``, ``finished``, ``failed``, ``killed``, or ``unknown`` without a lock."""
        holder, end = self.holder, self.end
        if holder is not None and holder.alive:
            return "running"
        if end is not None:
            return "failed" if end.error else "finished"
        return "unknown" if holder is None else "killed"

    def decode(self) -> Decode | str:
        """Return the decoder of tokens, or why there is none."""
        with self._lock:
            if self._decode is None:
                try:
                    self._decode = load_decode(RunFiles(self.folder, self.folder, {}, self.config))
                except ModuleNotFoundError as error:
                    if (extra_error := missing_extra_error(error, "the text of tokens")) is None:
                        raise
                    self._decode = str(extra_error)
            return self._decode

    def chat_format(self) -> ChatRenderer | str:
        """Return the chat format that reads tool calls, or why there is none; the first call imports torch."""
        with self._format_lock:
            if self._format is None:
                self._format = load_format(self.folder)
            return self._format

    def signature(self) -> tuple[int, ...]:
        """Return numbers that change when the run writes metrics, rollouts, its journal, its league, its lock or its end."""
        names = (
            "metrics.jsonl",
            "end.json",
            "journal/log.jsonl",
            "league.jsonl",
            CONFIG,
            LOCK,
            "rollouts",
            "checkpoints",
        )
        return (*(_changed_at(self.folder / name) for name in names), _newest_size(self.folder / "rollouts"))


def _changed_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _newest_size(rollouts: Path) -> int:
    """Return the size of the last file by name: appending to it does not change its folder."""
    try:
        newest = max((entry.name for entry in os.scandir(rollouts)), default="")
        return (rollouts / newest).stat().st_size
    except OSError:
        return 0


class Runs:
    """The runs under a folder. Thread-safe.

    Args:
        root: the folder.

    Raises:
        UserError: there is no such folder.
    """

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise UserError(f"{root}: there is no such folder; give a folder with runs, such as runs")
        self.root = root.resolve()
        self._lock = threading.Lock()
        self._runs: dict[str, DashboardRun] = {}
        self._listed_at = -LISTED_S

    def all(self) -> list[DashboardRun]:
        """Return all runs, by name."""
        with self._lock:
            if time.monotonic() - self._listed_at > LISTED_S:
                folders = {folder.relative_to(self.root).as_posix(): folder for folder in find_runs(self.root)}
                self._runs = {
                    name: self._runs.get(name) or DashboardRun(name, folder) for name, folder in sorted(folders.items())
                }
                self._listed_at = time.monotonic()
            return list(self._runs.values())

    def run(self, name: str) -> DashboardRun:
        """Return a run by its name.

        Raises:
            UserError: there is none.
        """
        runs = {run.name: run for run in self.all()}
        if name not in runs:
            raise UserError(f"there is no run {name!r} under {self.root}")
        return runs[name]


def find_runs(root: Path) -> Iterator[Path]:
    """Yield the folders of runs, ``root`` itself first; links are not followed, and at most `MOST_FOLDERS` are looked at."""
    waiting = [(root, 0)]
    for _ in range(MOST_FOLDERS):
        if not waiting:
            return
        folder, depth = waiting.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue  # not readable, or deleted since
        folders = {entry.name for entry in entries if entry.is_dir(follow_symlinks=False)}
        files = {entry.name for entry in entries} - folders
        if "metrics.jsonl" in files or "rollouts" in folders or {CONFIG, LOCK} <= files:
            yield folder
        if depth < DEPTH:
            inner = sorted(name for name in folders - _OWN if not name.startswith("."))
            waiting += [(folder / name, depth + 1) for name in reversed(inner)]
