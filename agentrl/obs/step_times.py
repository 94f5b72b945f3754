"""Times of whole training steps: phases, what lies between steps, and host CPU time by kind of process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from agentrl.obs.host_memory import processes_by_kind
from agentrl.obs.progress import PAUSES, STEP_PHASES


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measurements of a step, from the metrics of the step before to its own."""

    step: int
    wall_s: float
    cpu_s: Mapping[str, float]
    """Host CPU time by kind of process."""
    metrics: Mapping[str, float]

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase, and as ``other`` and ``other, between steps`` what is in none."""
        seconds = {name: self.metrics.get(f"time/{name}_s", 0.0) for name in (*STEP_PHASES, "other", *PAUSES)}
        between_s = self.wall_s - self.metrics["time/step_s"]
        return seconds | {"other, between steps": between_s - sum(seconds[name] for name in PAUSES)}


class StepTracker:
    """Receives the metrics of a run, and measures its steps."""

    def __init__(self, on_step: Callable[[StepTimes], None]) -> None:
        self._on_step = on_step
        self._time_s: float | None = None
        self._cpu_s: Mapping[str, float] = {}

    def restart(self) -> None:
        """Leave out the next step too."""
        self._time_s = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Measure a step that has ended; the first, which includes the start of the run, is left out."""
        if "time/step_s" not in metrics:
            return
        time_s, cpu_s = time.perf_counter(), cpu_seconds()
        if self._time_s is not None:
            spent_s = {kind: seconds - self._cpu_s.get(kind, 0.0) for kind, seconds in cpu_s.items()}
            self._on_step(StepTimes(step, time_s - self._time_s, spent_s, metrics))
        self._time_s, self._cpu_s = time_s, cpu_s

    def samples(self, step: int, table: Sequence[Sequence[object]]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def cpu_seconds() -> dict[str, float]:
    """Return the CPU time of this process and its descendants so far, ended ones included, by kind."""
    seconds: dict[str, float] = {}
    for kind, process in processes_by_kind():
        with suppress(psutil.Error):  # it has ended
            user_and_system = sum(process.cpu_times()[:4])  # of the process, and of its children that have ended
            seconds[kind] = seconds.get(kind, 0.0) + user_and_system
    return seconds
