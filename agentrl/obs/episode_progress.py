"""Progress of an evaluation or of sampling, in episodes."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agentrl.obs.progress import format_left

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
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("episodes"))
            self._bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True)
            self._task = self._bar.add_task("starting engine and tools", total=total)

    def begin(self) -> None:
        """Start the clock: the first episodes start now."""
        self._began = self._shown = time.monotonic()
        if self._bar is not None:
            self._bar.reset(self._task, description=self._activity)
        else:
            self._console.print(f"{self._activity}: {self._total} episodes", highlight=False, soft_wrap=True)

    def add(self) -> None:
        """Count a finished episode."""
        self.done += 1
        now = time.monotonic()
        if self._bar is not None:
            self._bar.advance(self._task)
        elif now - self._shown >= EVERY_S and self.done < self._total:
            self._shown = now
            left = (now - self._began) / self.done * (self._total - self.done)
            line = f"{self._activity}: {self.done}/{self._total} episodes, about {format_left(left)} left"
            self._console.print(line, highlight=False, soft_wrap=True)

    def print_text(self, text: str) -> None:
        """Print text without markup or wrapping above the progress bar."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> EpisodeProgress:
        """Show the progress bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.stop()
