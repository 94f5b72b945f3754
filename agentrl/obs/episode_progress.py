"""Progress of an evaluation or of sampling, in episodes."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agentrl.obs.console import print_message
from agentrl.obs.step_progress import format_left

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
