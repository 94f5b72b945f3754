"""Host memory of a run's processes by kind, with warnings before the machine or the container has none left."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

PERIOD_S = 5.0
"""Seconds between measurements."""
GIB = 2**30
NEAR_LIMIT = 0.9
"""Used share of the limit from which there is a warning."""
STEPS = 16
"""Steps over which steady growth is judged."""
GROWTH_GIB, GROWTH_SHARE = 0.5, 0.1
"""Least growth over these steps, in GiB and of the memory at their begin, for a warning."""
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("learner", ("ray::LearnerActor",)),
    ("engine", ("agentrl.inference.embedded", "sglang", "ray::EngineHost")),
    ("tool_server", ("agentrl.cli.main tools serve", "agentrl tools serve")),
    ("sandbox", ("bwrap", "sandbox/runner")),
    ("rewards", ("agentrl.rewards.math_worker",)),
    ("ray", ("ray::", "raylet", "gcs_server", "/ray/")),
)
"""Kinds of processes with texts of their command lines. Others are of the kind of the process that started them."""
CGROUP = Path("/sys/fs/cgroup")


class HostMemory:
    """Context manager that measures the memory of this process and all that it has started, in a thread.

    Memory is the resident memory without what is shared with other processes. Processes on other machines, and those of a Ray
    cluster that the run has joined, are not measured.

    Args:
        warn: prints a warning; called in the thread too.
        measure: returns bytes by kind of process.
        limit: returns the used bytes and the limit of the machine or the container.
    """

    def __init__(
        self,
        warn: Callable[[str], None],
        measure: Callable[[], Mapping[str, int]] | None = None,
        limit: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self._warn = warn
        self._measure = measure or process_memory
        self._limit = limit or used_and_limit
        self._peaks: dict[str, int] = {}
        self._peak_share = 0.0
        self._newest: tuple[dict[str, int], float] = {}, 0.0
        """The newest measurement: bytes by kind, and the used share of the limit."""
        self._recent: deque[dict[str, float]] = deque(maxlen=STEPS)
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="host-memory", daemon=True)

    def __enter__(self) -> HostMemory:
        """Start to measure."""
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop the thread."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        self.update()
        while not self._stop.wait(PERIOD_S):
            self.update()

    def update(self) -> None:
        """Measure now, and warn if little memory is left."""
        measured, (used, limit) = self._measure(), self._limit()
        with self._lock:
            self._newest = dict(measured), used / limit
            self._peaks = {kind: max(self._peaks.get(kind, 0), size) for kind, size in measured.items()}
            self._peak_share = max(self._peak_share, used / limit)
        if used > NEAR_LIMIT * limit and measured:
            most = max(measured, key=lambda kind: measured[kind])
            self._warn_once(
                "limit",
                f"warning: {used / GIB:.1f} of {limit / GIB:.1f} GiB of host memory are in use, {measured[most] / GIB:.1f} of "
                f"them by the processes of kind {most}; without memory the kernel kills processes of the run",
            )

    def metrics(self) -> dict[str, float]:
        """Return the largest values since the last call, or the newest; warn if those of `STEPS` calls grow steadily."""
        with self._lock:
            peaks = {kind: size / GIB for kind, size in self._peaks.items()}
            share = self._peak_share
            self._peaks, self._peak_share = self._newest
        if not peaks:
            return {}
        self._recent.append(peaks)
        for kind in peaks:
            values = [peaks_of_step[kind] for peaks_of_step in self._recent if kind in peaks_of_step]
            if len(values) == STEPS and grows(values):
                self._warn_once(
                    kind,
                    f"warning: the host memory of the processes of kind {kind} has grown from {values[0]:.2f} to "
                    f"{values[-1]:.2f} GiB over the last {STEPS} steps",
                )
        sizes = {f"host_memory/{kind}_gib": size for kind, size in peaks.items()}
        return sizes | {"host_memory/total_gib": sum(peaks.values()), "host_memory/used_share": share}

    def _warn_once(self, subject: str, text: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            self._warn(text)


def grows(values: list[float]) -> bool:
    """Return whether memory, in GiB, grows steadily: each quarter's lowest value is above that of the quarter before."""
    quarter = len(values) // 4
    lows = [min(values[begin : begin + quarter]) for begin in range(0, 4 * quarter, quarter)]
    gained = lows[-1] - lows[0]
    rising = all(higher > lower for lower, higher in itertools.pairwise(lows))
    return rising and gained > max(GROWTH_GIB, GROWTH_SHARE * lows[0])


def process_memory() -> dict[str, int]:
    """Return the bytes of this process and its descendants, by kind."""
    sizes: Counter[str] = Counter()
    for kind, process in processes_by_kind():
        with suppress(psutil.Error):  # it has ended
            memory = process.memory_info()
            sizes[kind] += memory.rss - getattr(memory, "shared", 0)
    return dict(sizes)


def processes_by_kind() -> Iterator[tuple[str, psutil.Process]]:
    """Yield this process, which is the ``trainer``, and its descendants, with their kinds."""
    this_process = psutil.Process()
    kinds = {this_process.pid: "trainer"}
    yield "trainer", this_process
    for process in this_process.children(recursive=True):  # parents come first
        with suppress(psutil.Error):  # it has ended
            kinds[process.pid] = process_kind(process.cmdline(), kinds.get(process.ppid(), "other"))
            yield kinds[process.pid], process


def process_kind(words: Iterable[str], parent: str) -> str:
    """Return the kind of a process with this command line."""
    line = " ".join(words)
    for kind, texts in KINDS:
        if any(text in line for text in texts):
            return kind
    return "other" if parent == "trainer" else parent


def used_and_limit(cgroup: Path = CGROUP) -> tuple[int, int]:
    """Return the bytes in use, and the limit of the container (cgroup v2) or the memory of the machine, whichever is lower."""
    memory = psutil.virtual_memory()
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max" and int(limit) < memory.total:
            stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
            # The kernel drops cached files before it lets a process fail.
            return int((cgroup / "memory.current").read_text()) - int(stat.get("inactive_file", 0)), int(limit)
    except (OSError, ValueError):
        pass  # no cgroup of version 2 is mounted here
    return memory.total - memory.available, memory.total
