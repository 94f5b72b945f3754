"""Traces of a run: spans of steps, phases, episodes, turns, tool calls and requests as Chrome trace events, for Perfetto."""

from __future__ import annotations

import heapq
import math
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import BufferedWriter
from pathlib import Path
from time import monotonic
from typing import Any

import orjson

from agentrl.obs.remote_waits import RemoteWait
from agentrl.obs.trackers import Tracker
from agentrl.obs.waiting import PHASE, REQUEST, ROLLOUT, TOOL, TURN, waiting

FOLDER = "traces"
"""Folder of trace files in a run folder."""
RUN, EPISODES = 1, 2
"""Groups of tracks ("processes" of the format): what the run does, and its episodes. Those of runner process 0 are group 3,
and so on."""
STEPS_TRACK = 0
"""The track of `RUN` with one span for each training step."""
FLUSH_S = 1.0
"""Seconds between writes: a killed run loses no more."""
LONG_S = 10.0
"""A span that is open for this long has an event of its begin in the file, so that the file of a run that hangs shows it."""
KINDS = frozenset((PHASE, ROLLOUT, TURN, TOOL, REQUEST))
"""Kinds of which every span is written. Others are left out inside episodes: each span costs the runner CPU time."""
SHORT_S = 1e-3
"""Shorter spans of other kinds are left out everywhere."""
FILE_MIB = 256
"""Largest trace of a step; later spans of the step are counted instead."""
COUNTERS = ("train/reward", "engine_idle", "learner_idle", "host_memory/")
"""Prefixes of the metrics that are drawn in the trace."""
_SPAN = b'{"name":%b,"ts":%.1f,"pid":%d,"tid":%d,"ph":"%b","dur":%.1f,"args":{"of":%b%b}},\n'
"""A span's line. Formatting it takes half as long as `orjson` with the dict that it would need."""
_STEP_FILE = re.compile(r"step_(\d+)\.json")


@dataclass(slots=True)
class _Track:
    """A line of the timeline, whose spans are nested."""

    group: int
    number: int
    top: _Span | None = None
    """The innermost span."""


@dataclass(slots=True)
class _Span:
    """A span in progress."""

    wait: waiting
    track: _Track
    below: _Span | None
    """The span around it on its track."""
    ended: bool = False
    begun_in: int = -1
    """Number of the file that has its begin; -1: none has."""


_Ended = tuple[_Span, str, float, str] | dict[str, Any]
"""A span with its details, its end and the name of its error; or an event."""


@dataclass(slots=True)
class _Tracks:
    """The tracks of one group: the lowest free number is used again."""

    group: int
    free: list[int] = field(default_factory=list)
    count: int = 0

    def take(self) -> _Track:
        if self.free:
            return _Track(self.group, heapq.heappop(self.free))
        self.count += 1
        return _Track(self.group, self.count)


class TraceFiles(Tracker):
    """Writes one file of Chrome trace events for each training step; a `WaitListener` and a `Tracker`.

    The file of a step has what ended since the step before it. A span of an episode lies on a track with the spans inside it;
    spans at the same time lie on different tracks. Files are written in a thread. Without its last line, which a killed run
    does not write, a file is readable by Perfetto and Chrome, and by `read_trace`.

    Args:
        folder: of the run.
        step: the first step.
        keep: files that are kept; older ones are deleted.
        note: prints a message for the user.
        file_mib: see `FILE_MIB`.
    """

    def __init__(
        self, folder: Path, *, step: int, keep: int, note: Callable[[str], None], file_mib: float = FILE_MIB
    ) -> None:
        self._folder = folder / FOLDER
        self._keep = keep
        self._note = note
        self._most = int(file_mib * 2**20)
        self._lock = threading.Lock()
        self._open: dict[waiting, _Span] = {}
        self._tracks = {group: _Tracks(group) for group in (RUN, EPISODES)}
        self._ended: deque[_Ended | int] = deque()
        """What is to be written; a number begins the file of that step."""
        self._written = self._dropped = 0
        self._step = step
        self._closed = False
        self._stop = threading.Event()
        self._folder.mkdir(parents=True, exist_ok=True)
        for repeated in trace_files(folder):
            if repeated.name >= f"step_{step:06d}.json":  # of the run that is resumed
                repeated.unlink()
        self._file = self._begin_file()
        self._thread = threading.Thread(target=self._write_all, name="trace", daemon=True)
        self._thread.start()

    # Spans

    def on_begin(self, wait: waiting) -> None:
        """Give a span its track: that of the span around it, if no other one is open there."""
        kind, parent = wait.kind, self._around(wait)
        if kind not in KINDS and parent is not None and parent.track.group != RUN:
            return
        episodes = EPISODES + 1 + wait.process if isinstance(wait, RemoteWait) else EPISODES
        group = episodes if kind == ROLLOUT else RUN if parent is None else parent.track.group
        with self._lock:
            if group not in self._tracks:
                self._tracks[group] = _Tracks(group)
                self._ended.append(_group_name(group))
            shared = parent is not None and parent.track.top is parent and parent.track.group == group
            track = parent.track if parent is not None and shared else self._tracks[group].take()
            track.top = self._open[wait] = _Span(wait, track, track.top)

    def _around(self, wait: waiting) -> _Span | None:
        outer = wait.parent
        while isinstance(outer, waiting):
            if (span := self._open.get(outer)) is not None:
                return span
            outer = outer.parent
        return None

    def on_end(self, wait: waiting, ended_at: float, error: str) -> None:
        """Write a span."""
        span = self._open.pop(wait, None)
        if span is None:
            return
        with self._lock:
            span.ended, track = True, span.track
            while track.top is not None and track.top.ended:
                track.top = track.top.below
            if track.top is None:
                heapq.heappush(self._tracks[track.group].free, track.number)
        if self._closed or (ended_at - wait.since < SHORT_S and wait.kind not in KINDS):
            return
        self._ended.append((span, wait.details, ended_at, error))

    # Steps

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """End the file of a training step; an evaluation, whose metrics are logged too, ends none."""
        if "time/step_s" not in metrics or self._closed:
            return
        ended_at = monotonic()
        seconds = metrics["time/step_s"]
        span = {"name": f"step {step}", "ph": "X", "ts": _us(ended_at - seconds), "dur": _us(seconds)}
        plotted = {key: value for key, value in metrics.items() if key.startswith(COUNTERS) and math.isfinite(value)}
        counters = [{"name": key, "ph": "C", "ts": _us(ended_at), "args": {"value": plotted[key]}} for key in plotted]
        self._ended.extend(event | {"pid": RUN, "tid": STEPS_TRACK} for event in (span, *counters))
        self._ended.append(step + 1)

    def close(self) -> None:
        """Write the remaining spans, and end the file."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            self._closed = True

    # The thread that writes

    def _write_all(self) -> None:
        try:
            announced = monotonic()
            while not self._stop.wait(FLUSH_S):
                self._write_events()
                if monotonic() - announced > LONG_S:
                    announced = monotonic()
                    self._write_long(announced)
                self._file.flush()
            self._write_events()
            self._end_file()
        except OSError as error:  # a full disk must not end the run
            self._closed = True
            self._ended.clear()
            self._note(f"obs.trace: no more spans are written: {error}")

    def _write_events(self) -> None:
        while self._ended:
            ended = self._ended.popleft()
            if isinstance(ended, int):
                self._end_file()
                self._step = ended
                self._file = self._begin_file()
            elif isinstance(ended, dict):
                self._write(orjson.dumps(ended) + b",\n")
            else:
                self._write(self._line(*ended))

    def _line(self, span: _Span, details: str, ended_at: float, error: str) -> bytes:
        """Return the line of a span that has ended; if the file has its begin, that of its end."""
        if span.begun_in == self._step:
            name, _, pid, tid = _head(span, details)
            return b'{"name":%b,"ph":"E","ts":%.1f,"pid":%d,"tid":%d},\n' % (name, ended_at * 1e6, pid, tid)
        error_field = b',"error":%b' % orjson.dumps(error) if error else b""
        return _SPAN % (
            *_head(span, details),
            b"X",
            (ended_at - span.wait.since) * 1e6,
            orjson.dumps(details),
            error_field,
        )

    def _write_long(self, current_time: float) -> None:
        """Write the begin of spans that are open for long."""
        with self._lock:
            spans = [
                span
                for span in list(self._open.values())
                if span.begun_in < 0 and current_time - span.wait.since > LONG_S
            ]
            for span in spans:
                span.begun_in = self._step
        for span in spans:
            details = span.wait.details
            self._write(_SPAN % (*_head(span, details), b"B", 0.0, orjson.dumps(details), b""))

    def _write(self, line: bytes) -> None:
        if self._written + len(line) > self._most:
            self._dropped += 1
            return
        self._file.write(line)
        self._written += len(line)

    def _begin_file(self) -> BufferedWriter:
        path = self._folder / f"step_{self._step:06d}.json"
        earlier_files = [file for file in trace_files(self._folder.parent) if file < path]
        for old in earlier_files[: max(0, len(earlier_files) - self._keep + 1)]:
            old.unlink()
        file = path.open("wb")
        self._written = self._dropped = 0
        heads = [_group_name(group) for group in [*self._tracks]]
        steps = {"name": "thread_name", "ph": "M", "pid": RUN, "tid": STEPS_TRACK, "args": {"name": "steps"}}
        file.write(b"[\n" + b"".join(orjson.dumps(head) + b",\n" for head in (*heads, steps)))
        file.flush()
        return file

    def _end_file(self) -> None:
        if self._dropped:
            self._note(
                f"obs.trace: the trace of step {self._step} lacks {self._dropped} spans: it is full ({self._most >> 20} MiB)"
            )
        self._file.write(
            orjson.dumps({"name": "end", "ph": "M", "pid": RUN, "args": {"dropped": self._dropped}}) + b"\n]\n"
        )
        self._file.close()


def trace_files(folder: Path) -> list[Path]:
    """Return the trace files of a run folder, in the order of their steps."""
    return sorted(path for path in (folder / FOLDER).glob("step_*.json") if _STEP_FILE.fullmatch(path.name))


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace file; one of a killed run has no end, and its last line may be cut."""
    events: list[dict[str, Any]] = []
    for line in path.read_bytes().split(b"\n"):
        try:
            events.append(orjson.loads(line.removesuffix(b",")))
        except orjson.JSONDecodeError:
            continue  # the brackets, and a line that was cut
    return events


def _head(span: _Span, details: str) -> tuple[bytes, float, int, int]:
    """Return the first values of `_SPAN`: name, begin, track."""
    wait, track = span.wait, span.track
    name = wait.kind
    if name == PHASE:
        name = details.rpartition(", ")[2]
    elif name == TOOL:
        name = f"{TOOL} {details.partition(',')[0]}"
    return orjson.dumps(name), wait.since * 1e6, track.group, track.number


def _group_name(group: int) -> dict[str, Any]:
    """Return the event that names a group of tracks."""
    names = {RUN: "run", EPISODES: "episodes"}
    name = names.get(group, f"episodes of runner {group - EPISODES - 1}")
    return {"name": "process_name", "ph": "M", "pid": group, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
