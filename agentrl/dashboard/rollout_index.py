"""Index of a run's rollouts for tables of many thousands: filtered, sorted and sent by the page.

It is built from the newest step to the oldest, within a time a request, and grows with the files while they are written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentrl.core.errors import ConfigError
from agentrl.core.types import Rollout
from agentrl.obs.rollout_headers import RolloutHeader, scan_headers
from agentrl.obs.rollouts import evaluation_files, read_advantages, rollout_files
from agentrl.obs.viewer.page_data import differences, last_words

FIRST_BUDGET_S, BUDGET_S = 0.1, 0.4
"""Seconds that the first request, and each later one, spends on reading files; the next one continues."""
PROMPT_CHARACTERS = 2000
"""Characters of a group's prompt that are kept, from its end: questions come after instructions."""
SORTS = ("step", "reward", "advantage", "tokens", "sampled", "turns", "seconds")
"""Sort columns of rollouts."""
GROUP_SORTS = ("step", "reward", "deviation", "rollouts")
"""Sort columns of groups."""

Kind = Literal["train", "eval"]
Columns = dict[str, NDArray[Any]]
"""A value of each rollout, by name."""

_COLUMNS = (
    "id", "prompt", "reward", "stop", "failure", "dropped", "tokens", "sampled", "turns", "seconds", "tool_seconds", "excerpt",
    "start", "end", "advantage",
)  # fmt: skip


class FileKey(NamedTuple):
    """A file of rollouts."""

    kind: Kind
    step: int


@dataclass(slots=True)
class _File:
    """What is known of a file, with a list for each column."""

    path: Path
    signature: tuple[int, int, int] = (0, 0, 0)
    """Inode, size and modification time when it was read; the size is 0 until it was read to its end."""
    inode: int = 0
    read_to: int = 0
    """End of the last header that is known."""
    last_bytes: bytes = b""
    """Bytes before `read_to`: a file that a resumed run has written again may have its old inode, and more bytes."""
    advantages_at: int = 0
    """Modification time of the step's advantages."""
    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in _COLUMNS})
    error: str = ""
    """Why it cannot be read."""

    def clear(self) -> None:
        self.read_to, self.last_bytes = 0, b""
        self.columns = {name: [] for name in _COLUMNS}


@dataclass(frozen=True, slots=True)
class Query:
    """Which rollouts, in which order."""

    kind: Kind = "train"
    steps: tuple[float, float] | None = None
    """First and last, both included."""
    rewards: tuple[float, float] | None = None
    """Lowest and highest, both included."""
    stop: str = ""
    """Stop reason; empty: all."""
    status: str = ""
    """``failed``, ``dropped``, ``damaged``, ``whole``; empty: all."""
    group: str = ""
    """Prompt id; empty: all."""
    words: str = ""
    """Words in the texts, ids and prompts, lower case; empty: all."""
    sort: str = "step"
    descending: bool = True


@dataclass(slots=True)
class _Search:
    """Rollouts whose recorded texts have some words: their starts, by file, and to where each file was read."""

    read_to: dict[FileKey, int] = field(default_factory=dict)
    starts: dict[FileKey, set[int]] = field(default_factory=dict)


class RolloutIndex:
    """The rollouts of a run. Thread-safe; a call reads files for about `BUDGET_S`.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._files: dict[FileKey, _File] = {}
        self._prompts: dict[tuple[FileKey, str], str] = {}
        self._search: tuple[str, _Search] = ("", _Search())
        self._version = 0
        self._columns: tuple[int, Kind, Columns] = (-1, "train", {})

    def path(self, key: FileKey) -> Path:
        """Return a file's path.

        Raises:
            ConfigError: there is none.
        """
        with self._lock:
            if key not in self._files:
                self._list_files()
            if key not in self._files:
                raise ConfigError(f"{self._folder} has no rollouts of the {key.kind} step {key.step}")
            return self._files[key].path

    def rows(self, query: Query, offset: int, limit: int) -> dict[str, object]:
        """Return rows ``offset`` to ``offset + limit`` of the rollouts of a query.

        Returns:
            ``{"total", "matching", "complete", "rows": [{column: value}], "counts": {"stop": {…}, "status": {…}}, "errors"}``;
            ``complete`` is false while files are still to be read.
        """
        with self._lock:
            complete, columns, places = self._select(query)
            page = self._sort(columns, places, query)[offset : offset + limit]
            rows = [{name: _plain(columns[name][number]) for name in _SENT} for number in page.tolist()]
            return {**self._head(columns, places, query.kind, complete=complete), "rows": rows}

    def groups(self, query: Query, offset: int, limit: int) -> dict[str, object]:
        """Return groups ``offset`` to ``offset + limit`` of the rollouts of a query, like `rows`: a group a row."""
        with self._lock:
            complete, columns, places = self._select(query)
            groups = _group_table(columns, places)
            keys = {"step": groups["step"], "reward": groups["reward"], "deviation": groups["deviation"]}
            sort_values = keys.get(query.sort, groups["rollouts"])
            order = np.lexsort((groups["place"], -sort_values if query.descending else sort_values))
            page = order[offset : offset + limit].tolist()
            rows = [{name: _plain(values[number]) for name, values in groups.items()} for number in page]
            names = zip(groups["step"][page].tolist(), groups["prompt"][page].tolist(), strict=True)
            prompts = [self._prompts.get((FileKey(query.kind, step), prompt), "") for step, prompt in names]
            for row, excerpt in zip(rows, differences(prompts), strict=True):
                row["excerpt"] = excerpt
            head = self._head(columns, places, query.kind, complete=complete)
            return {**head, "matching": len(order), "rows": rows}

    def starts_of_group(self, key: FileKey, prompt_id: str) -> list[tuple[int, int]]:
        """Return where the rollouts of a group start and end in their file; the file is read as far as it is written.

        Raises:
            ConfigError: there is no such file, or it cannot be read.
        """
        with self._lock:
            self.path(key)
            file = self._files[key]
            while self._read(key, file, time.monotonic() + BUDGET_S):
                pass
            if file.error:
                raise ConfigError(file.error)
            columns = file.columns
            members = [number for number, prompt in enumerate(columns["prompt"]) if prompt == prompt_id]
            return [(columns["start"][number], columns["end"][number]) for number in members]

    def rewards_by_prompt(self, kind: Kind) -> dict[str, list[tuple[int, float]]]:
        """Return step and reward of the rollouts of each prompt, as far as they are read."""
        with self._lock:
            _, columns, _ = self._select(Query(kind))
            rewards: dict[str, list[tuple[int, float]]] = {}
            for prompt, step, reward in zip(columns["prompt"], columns["step"], columns["reward"], strict=True):
                rewards.setdefault(str(prompt), []).append((int(step), float(reward)))
            return rewards

    def _head(self, columns: Columns, places: NDArray[np.intp], kind: Kind, *, complete: bool) -> dict[str, object]:
        stops, stop_counts = np.unique(columns["stop"][places], return_counts=True)
        statuses = {name: int(_has_status(columns, name)[places].sum()) for name in STATUSES}
        errors = [file.error for key, file in self._files.items() if file.error and key.kind == kind]
        return {
            "total": len(columns["id"]),
            "matching": len(places),
            "complete": complete,
            "counts": {"stop": dict(zip(stops.tolist(), stop_counts.tolist(), strict=True)), "status": statuses},
            "errors": errors,
        }

    def _select(self, query: Query) -> tuple[bool, Columns, NDArray[np.intp]]:
        """Return whether all was read, the columns, and the places of the rollouts of a query."""
        deadline = time.monotonic() + (BUDGET_S if self._version else FIRST_BUDGET_S)
        complete = self._refresh(deadline)
        columns = self._arrays(query.kind)
        chosen = np.ones(len(columns["id"]), bool)
        for name, bounds in (("step", query.steps), ("reward", query.rewards)):
            if bounds is not None:
                chosen &= (columns[name] >= bounds[0]) & (columns[name] <= bounds[1])
        if query.stop:
            chosen &= columns["stop"] == query.stop
        if query.status:
            chosen &= _has_status(columns, query.status)
        if query.group:
            chosen &= columns["prompt"] == query.group
        if query.words:
            complete &= self._search_files(query, deadline)
            chosen &= self._matches(columns, query)
        return complete, columns, np.flatnonzero(chosen)

    def _sort(self, columns: Columns, places: NDArray[np.intp], query: Query) -> NDArray[np.intp]:
        values = columns[query.sort if query.sort in SORTS else "step"][places]
        # Rollouts of a group are next to each other, as they are in their file; NaN, such as of no advantage, comes last.
        keys = -values if query.descending else values
        return places[np.lexsort((places, keys))]

    def _arrays(self, kind: Kind) -> Columns:
        version, known_kind, arrays = self._columns
        if version == self._version and known_kind == kind:
            return arrays
        files = [(key.step, file.columns) for key, file in sorted(self._files.items()) if key.kind == kind]
        arrays = {name: _column(name, [value for _, columns in files for value in columns[name]]) for name in _COLUMNS}
        sizes = [len(columns["id"]) for _, columns in files]
        arrays["step"] = np.repeat(np.array([step for step, _ in files], np.int64), sizes)
        self._columns = (self._version, kind, arrays)
        return arrays

    def _refresh(self, deadline: float) -> bool:
        """Read what files have more than is known, the newest step first; return whether there was time for all."""
        self._list_files()
        for key in sorted(self._files, key=lambda key: (-key.step, key.kind)):
            if self._read(key, self._files[key], deadline):
                return False
        return True

    def _list_files(self) -> None:
        inner = self._folder / "rollouts"
        try:
            steps = rollout_files(self._folder)
            evaluations = evaluation_files(inner if inner.is_dir() else self._folder)
        except OSError:
            steps, evaluations = {}, {}
        paths = {FileKey("train", step): path for step, path in steps.items()}
        paths |= {FileKey("eval", step): path for step, path in evaluations.items()}
        for key in [key for key, file in self._files.items() if paths.get(key) != file.path]:
            del self._files[key]
            self._version += 1
        for key, path in paths.items():
            if key not in self._files:
                self._files[key] = _File(path)

    def _read(self, key: FileKey, file: _File, deadline: float) -> bool:
        """Read a file as far as it is written; return whether the time was up before."""
        try:
            status = file.path.stat()
        except OSError:
            return False  # it was renamed or deleted since the folder was listed
        signature = (status.st_ino, status.st_size, status.st_mtime_ns)
        if signature != file.signature:
            if status.st_ino != file.inode or file.path.suffix == ".parquet" or _bytes_before(file) != file.last_bytes:
                file.clear()
            file.inode, file.error, self._version = status.st_ino, "", self._version + 1
            try:
                for number, header in enumerate(scan_headers(file.path, file.read_to)):
                    self._add(key, file, header)
                    if number % 64 == 63 and time.monotonic() > deadline:
                        return True
            except ConfigError as error:
                file.error = str(error)
            finally:
                file.last_bytes = _bytes_before(file)
            file.signature, file.advantages_at = signature, 0
        self._read_advantages(key, file)
        return time.monotonic() > deadline

    def _read_advantages(self, key: FileKey, file: _File) -> None:
        path = file.path.with_suffix(".advantages.json")
        try:
            changed_at = path.stat().st_mtime_ns
        except OSError:
            return
        if key.kind == "train" and changed_at != file.advantages_at:
            file.advantages_at, self._version = changed_at, self._version + 1
            try:
                advantages = read_advantages(path.parent, key.step)
            except ConfigError as error:
                file.error = str(error)
                return
            file.columns["advantage"] = [advantages.get(rollout_id) for rollout_id in file.columns["id"]]

    def _add(self, key: FileKey, file: _File, header: RolloutHeader) -> None:
        for name, value in _cells(header).items():
            file.columns[name].append(value)
        if isinstance(header.rollout, Rollout):
            prompt = header.rollout.prompt[-PROMPT_CHARACTERS:]
            self._prompts.setdefault((key, header.rollout.prompt_id), prompt)
        file.read_to = header.end

    def _search_files(self, query: Query, deadline: float) -> bool:
        """Look for the words of a query in the recorded texts; return whether there was time for all files."""
        words, search = self._search
        if words != query.words:
            search = _Search()
            self._search = (query.words, search)
        for key in sorted(self._files, key=lambda key: -key.step):
            file = self._files[key]
            if key.kind != query.kind:
                continue
            starts = search.starts.setdefault(key, set())
            read_to = search.read_to.get(key, 0)
            try:
                for number, header in enumerate(scan_headers(file.path, read_to) if read_to < file.read_to else ()):
                    if any(query.words in text.lower() for text in _texts(header)):
                        starts.add(header.start)
                    search.read_to[key] = header.end
                    if number % 64 == 63 and time.monotonic() > deadline:
                        return False
            except ConfigError as error:
                file.error = str(error)
        return True

    def _matches(self, columns: Columns, query: Query) -> NDArray[np.bool_]:
        starts = self._search[1].starts
        pairs = zip(columns["step"].tolist(), columns["start"].tolist(), strict=True)
        return np.array([start in starts.get(FileKey(query.kind, step), ()) for step, start in pairs], bool)


STATUSES = ("whole", "failed", "dropped", "damaged")
_SENT = ("step", *(name for name in _COLUMNS if name != "end"))
_FLOATS = frozenset(("reward", "seconds", "tool_seconds", "advantage"))
_TEXTS = frozenset(("id", "prompt", "stop", "failure", "excerpt"))
DAMAGED = "damaged"
"""In place of the stop reason of a rollout that cannot be decoded."""


def _cells(header: RolloutHeader) -> Mapping[str, object]:
    rollout = header.rollout
    position = {"start": header.start, "end": header.end, "tokens": header.tokens, "advantage": None}
    if isinstance(rollout, str):
        empty = {"id": "", "prompt": "", "reward": None, "failure": "", "dropped": False, "sampled": 0, "turns": 0}
        return position | empty | {"seconds": None, "tool_seconds": None, "stop": DAMAGED, "excerpt": rollout}
    return position | {
        "id": rollout.rollout_id,
        "prompt": rollout.prompt_id,
        "reward": rollout.reward,
        "stop": rollout.stop_reason.value,
        "failure": rollout.failure.kind.value if rollout.failure else "",
        "dropped": rollout.dropped,
        "sampled": rollout.sampled_tokens,
        "turns": len(rollout.turns),
        "seconds": rollout.seconds,
        "tool_seconds": rollout.tool_seconds,
        "excerpt": last_words(rollout),
    }


def _bytes_before(file: _File) -> bytes:
    """Return the bytes before the end of the last known header; empty if the file has fewer, or cannot be read."""
    first = max(0, file.read_to - 256)
    try:
        with file.path.open("rb") as stream:
            stream.seek(first)
            return stream.read(file.read_to - first)
    except OSError:
        return b""


def _texts(header: RolloutHeader) -> Iterator[str]:
    rollout = header.rollout
    if isinstance(rollout, str):
        return
    yield rollout.rollout_id
    yield rollout.prompt_id
    yield rollout.prompt
    for turn in rollout.turns:
        yield turn.action
        yield turn.observation
    if rollout.failure is not None:
        yield f"{rollout.failure.error}: {rollout.failure.message}"
    for seat in rollout.seats:
        yield from seat.moves


def _column(name: str, values: Sequence[object]) -> NDArray[Any]:
    if name in _TEXTS:
        return np.array(values, object)
    if name in _FLOATS:
        return np.array([np.nan if value is None else value for value in values], np.float64)
    return np.array(values, bool if name == "dropped" else np.int64)


def _has_status(columns: Columns, status: str) -> NDArray[np.bool_]:
    failed, dropped = columns["failure"] != "", columns["dropped"].astype(bool)
    damaged = columns["stop"] == DAMAGED
    masks = {"failed": failed, "dropped": dropped, "damaged": damaged, "whole": ~(failed | dropped | damaged)}
    return np.asarray(masks.get(status, np.ones(len(dropped), bool)), bool)


def _group_table(columns: Columns, places: NDArray[np.intp]) -> Columns:
    """Return a column for each fact of the groups of the rollouts at ``places``, in their order."""
    numbers: dict[tuple[int, str], int] = {}
    steps, prompts = columns["step"][places].tolist(), columns["prompt"][places].tolist()
    group_of = np.array([numbers.setdefault(key, len(numbers)) for key in zip(steps, prompts, strict=True)], np.intp)
    count = np.bincount(group_of, minlength=len(numbers))
    rewards = columns["reward"][places]
    is_number = ~np.isnan(rewards)
    weights = np.maximum(np.bincount(group_of[is_number], minlength=len(numbers)), 1)
    mean = np.bincount(group_of[is_number], rewards[is_number], len(numbers)) / weights
    variance = (
        np.bincount(group_of[is_number], (rewards[is_number] - mean[group_of[is_number]]) ** 2, len(numbers)) / weights
    )
    failed = columns["failure"][places] != ""
    return {
        "place": np.arange(len(numbers)),
        "step": np.array([step for step, _ in numbers], np.int64),
        "prompt": np.array([prompt for _, prompt in numbers], object),
        "rollouts": count,
        "reward": mean,
        "deviation": np.sqrt(variance),
        "failed": np.bincount(group_of, failed, len(numbers)).astype(np.int64),
        "tokens": np.bincount(group_of, columns["tokens"][places], len(numbers)) / np.maximum(count, 1),
    }


def _plain(value: object) -> object:
    """Return a NumPy value as one of Python; NaN as None."""
    plain = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(plain, float) and plain != plain else plain
