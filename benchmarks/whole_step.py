"""``agentrl bench step``: the whole training loop of a configuration, and where the time of its steps goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from agentrl.config.schema import Config
from agentrl.models.load import read_vocab_size
from agentrl.models.resolve import resolve_model
from agentrl.obs.host_memory import processes_by_kind
from agentrl.obs.progress import PAUSES, STEP_PHASES
from agentrl.train.preflight import check_run
from agentrl.train.run import run_training
from benchmarks.concurrency import start_scripted_engine


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

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Measure a step that has ended; of the first, which includes the start of the run, only the metrics count."""
        if "time/step_s" not in metrics:
            return
        time_s, cpu_s = time.perf_counter(), cpu_seconds()
        if self._time_s is not None:
            spent_s = {kind: seconds - self._cpu_s.get(kind, 0.0) for kind, seconds in cpu_s.items()}
            self._on_step(StepTimes(step, time_s - self._time_s, spent_s, metrics))
        self._time_s, self._cpu_s = time_s, cpu_s

    def samples(self, step: int, table: Sequence[Sequence[Any]]) -> None:
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


SCRIPTED: Mapping[str, Any] = {"algo": {"entropy_coef": 1e-6}}
"""Random turns have no reward that differs: with an entropy bonus their tokens are trained all the same."""


def scripted_settings(exits: ExitStack, folder: Path, config: Config, delay_s: float) -> dict[str, Any]:
    """Start a scripted engine, which ``exits`` ends, and return the settings with which a run uses it.

    Raises:
        EngineError: it does not start.
    """
    vocabulary = read_vocab_size(resolve_model(config.model.path))
    url = start_scripted_engine(exits, folder / "engine.log", vocabulary, delay_s)
    return {"sampler": {"backend": "sglang", "url": url}, **SCRIPTED}


def run_steps(config: Config, console: Console, on_step: Callable[[StepTimes], None]) -> None:
    """Train, and measure each step but the first.

    Raises:
        ConfigError: the run cannot start; see `check_run`.
        AgentrlError: it failed.
    """
    contents = check_run(config).contents
    asyncio.run(run_training(config, console, contents=contents, trackers=[StepTracker(on_step)]))
