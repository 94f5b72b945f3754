"""Progress on the console: of a run, a live table in a terminal or one line per step elsewhere; of an evaluation, in episodes."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import psutil
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentrl.obs.console import print_message
from agentrl.obs.waiting import PHASE, START, waiting

EVERY_S = 10.0
"""Seconds between two lines if the output is not a terminal."""


class EpisodeProgress:
    """Counts finished episodes: a progress bar in a terminal, elsewhere a line every `EVERY_S`."""

    def __init__(self, console: Console, total: int, activity: str = "evaluating") -> None:
        self.done = 0
        self._console = console
        self._total = total
        self._activity = activity
        self._began = self._shown = time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("episodes", markup=False),
            )
            self._bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True)
            self._task = self._bar.add_task("starting engine and tools", total=total)

    def begin(self) -> None:
        """Start the clock: the first episodes start now."""
        self._began = self._shown = time.monotonic()
        if self._bar is not None:
            self._bar.reset(self._task, description=self._activity)
        else:
            self.print_text(f"{self._activity}: {self._total} episodes")

    def add(self) -> None:
        """Count a finished episode."""
        self.done += 1
        current_time = time.monotonic()
        if self._bar is not None:
            self._bar.advance(self._task)
        elif current_time - self._shown >= EVERY_S and self.done < self._total:
            self._shown = current_time
            seconds_left = (current_time - self._began) / self.done * (self._total - self.done)
            line = f"{self._activity}: {self.done}/{self._total} episodes, about {format_left(seconds_left)} left"
            self.print_text(line)

    def print_text(self, text: str) -> None:
        """Print a message above the progress bar."""
        print_message(self._console, text)

    def __enter__(self) -> EpisodeProgress:
        """Show the progress bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.stop()


COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward", "train/reward", "{:.3f}"),
    ("exact match", "rollout/exact_match", "{:.3f}"),
    ("searches", "rollout/searches", "{:.2f}"),
    ("valid", "rollout/valid_format", "{:.0%}"),
    ("flat groups", "train/flat_groups", "{:.0%}"),
    ("dropped", "rollout/dropped", "{:.0f}"),
    ("tokens/s", "time/tokens_per_s", "{:,.0f}"),
    ("step s", "time/step_s", "{:.1f}"),
    ("rollout", "time/rollout_s", "{:.1f}"),
    ("tools", "time/tools_share", "{:.0%}"),
    ("sync", "time/sync_s", "{:.1f}"),
    ("train", "time/train_s", "{:.1f}"),
)
"""Title, metric and format of the columns after the step; columns whose metric the run lacks are omitted. In a mixed run the
reward of each source follows the reward.

``flat groups`` is the share of groups without reward variance, ``tools`` the share of the episodes' time in tool calls. The
seconds of a step are followed by those of its phases."""

SHOWN_STEPS = 12


def format_left(seconds: float) -> str:
    """Return seconds as ``4m05s`` or ``1h02m``."""
    minutes, seconds_left = divmod(int(seconds), 60)
    return f"{minutes}m{seconds_left:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


class ProgressView:
    """A live table in a terminal; plain lines if the output is not a terminal, or in mode ``plain``.

    Args:
        console: to print to.
        total_steps: of the run.
        mode: see ``obs.progress``.
        sources: of a mixed run, whose mean rewards are shown too.
    """

    def __init__(
        self,
        console: Console,
        total_steps: int,
        mode: Literal["auto", "live", "plain"] = "auto",
        sources: Collection[str] = (),
    ) -> None:
        self.console = console
        source_columns = ((name, f"train/{name}/reward", "{:.3f}") for name in sources)
        self._columns = (COLUMNS[0], *source_columns, *COLUMNS[1:])
        self.total = total_steps
        """Number of steps of the run."""
        self._rows: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=SHOWN_STEPS)
        self._durations: deque[float] = deque(maxlen=8)
        self._phase = "starting"
        self._done = 0
        self._seconds_left: float | None = None
        live = mode == "live" or (mode == "auto" and console.is_terminal)
        self._live = Live(self._table(), console=console, refresh_per_second=4, transient=False) if live else None
        self.start = StartTimes(self.print_text, summary_only=live)
        """Start times of the run."""

    def __enter__(self) -> ProgressView:
        """Start the live view."""
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop the live view; its last state stays on the screen."""
        if self._live:
            self._live.update(self._table(), refresh=True)
            self._live.stop()

    def phase(self, name: str) -> None:
        """Show the current phase."""
        self._phase = name
        if self._live:
            self._live.update(self._table())

    def note(self, message: RenderableType) -> None:
        """Print a message, text or a renderable, above the live view."""
        if isinstance(message, str):
            self.print_text(message)
        else:
            self.console.print(message)

    def print_text(self, text: str) -> None:
        """Print a message; safe to call from any thread."""
        print_message(self.console, text)

    def step(self, step: int, metrics: Mapping[str, float], seconds_left: float | None = None) -> None:
        """Show the metrics of a finished step; ``seconds_left`` is the rest of the run's time limit, if it has one."""
        self._done = step
        self._seconds_left = seconds_left
        self._rows.append((step, metrics))
        self._durations.append(metrics.get("time/step_s", 0.0))
        if self._live:
            self._live.update(self._table())
        else:
            columns = self._columns
            cells = "  ".join(f"{title} {form.format(metrics[key])}" for title, key, form in columns if key in metrics)
            self.print_text(f"step {step}/{self.total}  {cells}  left {self._time_left()}")

    def _time_left(self) -> str:
        if not self._durations:
            return "–"
        mean = sum(self._durations) / len(self._durations)
        seconds_left = mean * (self.total - self._done)
        return format_left(
            seconds_left if self._seconds_left is None else max(0.0, min(seconds_left, self._seconds_left))
        )

    def _table(self) -> RenderableType:
        shown = [column for column in self._columns if any(column[1] in metrics for _, metrics in self._rows)]
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("step", *(title for title, _, _ in shown)):
            table.add_column(title, justify="right")
        for step, metrics in self._rows:
            cells = (form.format(metrics[key]) if key in metrics else "–" for _, key, form in shown)
            table.add_row(str(step), *cells)
        status = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=max(1, self.total), completed=self._done, width=30)
        status.add_row(
            bar, Text(f"{self._done}/{self.total}"), Text(self._phase, "bold blue"), Text(f"left {self._time_left()}")
        )
        return Group(table, status)


_START_PARTS = {
    "training of the warm start": "warm_start",
    "start of Ray": "ray",
    "start of engine-": "engines",
    "start of the tool server": "tools",
    "learner rank": "learner",
    "critic rank": "critic",
    "step 0, weights": "sync",
    "step 0, evaluation": "evaluation",
}
"""What the line of a part of the start begins with, and the part's metric."""


class StartTimes:
    """How long the parts of a run's start take, until its first rollouts: a line for each, with one that sums up, and metrics.

    A `WaitListener`. Parts overlap: they are started at the same time.

    Args:
        print_text: prints a line; may be called from any thread.
        summary_only: print the last line alone, as with a live view.
    """

    def __init__(self, print_text: Callable[[str], None], *, summary_only: bool = False) -> None:
        self._print = print_text
        self._summary_only = summary_only
        self._texts: dict[waiting, str] = {}
        """Texts of what has begun and not ended."""
        self._is_over = False
        self._created_at = time.monotonic()
        self._preflight_s = time.time() - psutil.Process().create_time()
        self._spans: dict[str, list[tuple[float, float]]] = {}
        """Begin and end of the waits of each part, on the clock of `time.monotonic`."""
        self._unread: dict[str, float] = {}

    def on_begin(self, wait: waiting) -> None:
        """Print what begins: a phase, the start of a process, or what the phase ``start`` waits for itself."""
        parent = wait.parent
        is_in_start = isinstance(parent, waiting) and parent.kind == PHASE and parent.details == START
        is_part_of_start = is_in_start and wait.kind != "engine"  # a request to one, which is short
        if self._is_over or not (wait.kind in (PHASE, "start") or is_part_of_start):
            return
        text = wait.details if wait.kind == PHASE else wait.text
        if wait.kind == PHASE and text.endswith("rollout"):
            self._end(wait.since)
            return
        self._texts[wait] = text
        if not self._summary_only:
            self._print(f"{text} …")

    def on_end(self, wait: waiting, ended_at: float, error: str) -> None:
        """Print how long it took, unless it has failed."""
        text = self._texts.pop(wait, None)
        if text is None or error:
            return
        if name := next((name for begin, name in _START_PARTS.items() if text.startswith(begin)), None):
            self._spans.setdefault(name, []).append((wait.since, ended_at))
        if not self._summary_only:
            text = wait.text if wait.kind == "start" else text  # with what the start consisted of
            self._print(f"{text}: {ended_at - wait.since:.1f} s")

    def take_metrics(self) -> dict[str, float]:
        """Return the seconds of the start and of its parts, once it is over; nothing the next time."""
        metrics, self._unread = self._unread, {}
        return metrics

    def _end(self, ended_at: float) -> None:
        self._is_over = True
        seconds_by_name = {"preflight": self._preflight_s}
        seconds_by_name |= {name: covered_seconds(spans) for name, spans in self._spans.items()}
        total_s = self._preflight_s + ended_at - self._created_at
        self._unread = {"time/start_s": total_s} | {
            f"time/start_{name}_s": seconds for name, seconds in seconds_by_name.items()
        }
        words = ", ".join(f"{name.replace('_', ' ')} {seconds:.1f}" for name, seconds in seconds_by_name.items())
        self._print(f"first rollouts {total_s:.1f} s after the command began: {words}")


def covered_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Return how long at least one of ``spans``, each with its begin and its end, lasts."""
    seconds, covered_until = 0.0, -math.inf
    for begin, end in sorted(spans):
        seconds += max(0.0, end - max(begin, covered_until))
        covered_until = max(covered_until, end)
    return seconds


STEP_PHASES = ("rollout", "score", "teachers", "pack", "wake", "train", "record", "sync", "sleep", "snapshot")
"""Phases that divide a training step: none runs during another."""
PAUSES = ("log", "save", "eval_wait")
"""Phases of the time between a step and the one before."""


class Stopwatch:
    """Adds up seconds by phase: ``with watch("rollout"): …`` adds to ``time/rollout_s``. A phase may have parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """Return ``time/PHASE_s`` for each phase."""
        return {f"time/{name}_s": seconds for name, seconds in self.seconds.items()}

    def step_metrics(self, step_s: float) -> dict[str, float]:
        """Return `metrics` of a step that took ``step_s`` seconds, and as ``time/other_s`` what is in no phase."""
        phases_s = sum(self.seconds.get(name, 0.0) for name in STEP_PHASES)
        return self.metrics() | {"time/step_s": step_s, "time/other_s": step_s - phases_s}
