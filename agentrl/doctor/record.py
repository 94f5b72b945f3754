"""What the folder of a run records about it."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from typing import Literal

from agentrl.config.layers import CONFIG, load_layers, saved_layers
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError
from agentrl.learner.checkpoints import complete_checkpoints
from agentrl.obs.journal import JournalState, read_journal
from agentrl.obs.metrics import read_metrics
from agentrl.obs.run_end import RunEnd, read_end
from agentrl.obs.trace import read_trace, trace_files
from agentrl.runtime.run_dir import LockHolder, lock_holder

Severity = Literal["problem", "hint", "state"]
"""A problem ends or spoils the run, a hint is worth a look, a state is neither."""

RECENT = 10
"""Steps that are judged."""
FLAT_STEPS = 20
"""Least steps for a judgement of the reward."""
FLAT_GROUPS = 0.8
"""From this share of groups whose rewards are all equal on there is nothing to learn from."""
SOLVED = 0.95
"""A constant mean reward from this on is no problem: most rewards are at most 1."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact about a run."""

    severity: Severity
    title: str
    """What is the case."""
    evidence: tuple[str, ...]
    """Figures and lines of the run that show it."""
    advice: tuple[str, ...] = ()
    """What to do, with the keys to change."""


def age(seconds: float) -> str:
    """Return seconds as ``45s``, ``12m`` or ``3.5h``."""
    if seconds < 120:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.0f}m" if seconds < 7200 else f"{seconds / 3600:.1f}h"


def mean(values: list[float]) -> float:
    """Return the mean of at least one value."""
    return sum(values) / len(values)


LOG_BYTES = 200_000
"""What is read of the end of a log."""
_REPORT = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (.+)$")


@dataclass(frozen=True, slots=True)
class StallReport:
    """A report of the watchdog."""

    time: float
    """Seconds since the epoch."""
    why: str
    waits: tuple[str, ...]
    """What the run waited for, by phase; see `agentrl.obs.watchdog`."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run has left in its folder, and what its process does."""

    folder: Path
    config: Config
    steps: Sequence[Mapping[str, float]]
    """Metrics of training steps, the oldest first; NaN where the run has written null."""
    evaluations: Sequence[Mapping[str, float]]
    """Metrics of evaluations."""
    diagnosed_at: float
    """Time of the diagnosis, seconds since the epoch."""
    last_write: float
    """When the run wrote something, seconds since the epoch."""
    free_bytes: int
    """Free space of the folder's disk."""
    holder: LockHolder | None = None
    """The process that runs or ran."""
    end: RunEnd | None = None
    """How it ended; None: it has not, or it was killed."""
    stalls: Sequence[StallReport] = ()
    """Reports of the watchdog of the newest process, the oldest first."""
    open_spans: Sequence[str] = ()
    """Spans that the newest trace begins and does not end."""
    logs: Mapping[str, str] = field(default_factory=dict)
    """Ends of the logs of engines, tool servers and the router, by file name."""
    journal: JournalState | None = None
    """None if the run has none."""
    checkpoints: Sequence[Path] = ()
    """Whole checkpoints, the oldest first."""

    @property
    def step(self) -> int:
        """The last finished step."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def runs(self) -> bool:
        """Whether the run's process is alive."""
        return self.holder is not None and self.holder.alive

    def recent(self, key: str, count: int) -> list[float]:
        """Return the values of a metric in the last ``count`` steps, those that have a number for it."""
        return [row[key] for row in self.steps[-count:] if key in row and not isnan(row[key])]

    def values(self, key: str) -> list[float]:
        """Return the values of a metric in all steps that have a number for it."""
        return self.recent(key, len(self.steps))

    def family(self, key: str, count: int) -> list[str]:
        """Return the metrics of the last ``count`` steps that are ``key``, or of a part of the run: ``KEY/policy=first``."""
        rows = self.steps[-count:]
        return sorted({name for row in rows for name in row if name == key or name.startswith(f"{key}/")})


def read_record(folder: Path) -> RunRecord:
    """Read the folder of a run.

    Raises:
        ConfigError: it is not one, or one of its files is damaged.
    """
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} is no run, because it has no {CONFIG}")
    rows = read_metrics(folder / "metrics.jsonl", nulls=True)
    traces, holder = trace_files(folder), lock_holder(folder)
    return RunRecord(
        folder=folder,
        config=load_layers(saved_layers(folder)),
        steps=[row for row in rows if "time/step_s" in row],
        evaluations=[row for row in rows if "time/eval_s" in row],
        diagnosed_at=time.time(),
        last_write=max((path.stat().st_mtime for path in _progress_files(folder)), default=0.0),
        free_bytes=shutil.disk_usage(folder).free,
        holder=holder,
        end=read_end(folder),
        stalls=list(_stalls(folder / "logs" / "watchdog.log", _start_time(holder))),
        open_spans=_open_spans(traces[-1]) if traces else (),
        logs=dict(_logs(folder / "logs")),
        journal=read_journal(folder),
        checkpoints=complete_checkpoints(folder / "checkpoints"),
    )


def _progress_files(folder: Path) -> Iterator[Path]:
    """Yield the files that show progress; those that a stalled run writes too do not count."""
    yield folder / CONFIG
    for pattern in ("metrics.jsonl", "journal/log.jsonl", "rollouts/*", "checkpoints/*/state.json"):
        yield from folder.glob(pattern)


def _start_time(holder: LockHolder | None) -> float:
    """Return when the newest process of the run started, or 0 if it left no lock."""
    if holder is None:
        return 0.0
    try:
        return time.mktime(time.strptime(holder.since, "%Y-%m-%d %H:%M:%S"))
    except ValueError:
        return 0.0


def _stalls(log: Path, since: float) -> Iterator[StallReport]:
    if not log.is_file():
        return
    lines = _tail(log).splitlines()
    heads = [number for number, line in enumerate(lines) if _REPORT.match(line)]
    for begin in heads:
        match = _REPORT.match(lines[begin])
        assert match is not None, "heads are the lines that match"
        report_time = time.mktime(time.strptime(match[1], "%Y-%m-%d %H:%M:%S"))
        waits = []
        for line in lines[begin + 1 :]:
            if not line.startswith("  ") or line.startswith('  File "'):
                break
            waits.append(line.strip())
        if report_time >= since:
            yield StallReport(report_time, match[2], tuple(waits))


def _logs(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob("*.log")):
        if path.name != "watchdog.log":
            yield path.name, _tail(path)


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES))
        return file.read().decode("utf-8", errors="replace")


def _open_spans(path: Path) -> tuple[str, ...]:
    """Return the spans that were open for long when the file ended, the innermost last."""
    tracks: dict[tuple[int, int], list[str]] = {}
    for event in read_trace(path):
        spans = tracks.setdefault((event.get("pid", 0), event.get("tid", 0)), [])
        if event["ph"] == "B":
            spans.append(f"{event['name']} {event['args']['of']}")
        elif event["ph"] == "E" and spans:
            spans.pop()
    return tuple(span for spans in tracks.values() for span in spans)
