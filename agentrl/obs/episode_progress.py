"""How far an evaluation or sampling is, for whoever waits for it."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agentrl.obs.progress import format_left

EVERY_S = 10.0
"""Seconds between two lines where the output is no terminal."""


class EpisodeCount:
    """Counts episodes: a bar in a terminal, elsewhere a line now and then."""

    def __init__(self, console: Console, total: int, doing: str = "evaluating") -> None:
        self.done = 0
        self._console = console
        self._total = total
        self._doing = doing
        self._began = self._shown = time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("episodes"))
            self._bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True)
            self._task = self._bar.add_task("starting engine and tools", total=total)

    def begin(self) -> None:
        """Say that the first episodes start now."""
        self._began = self._shown = time.monotonic()
        if self._bar is not None:
            self._bar.reset(self._task, description=self._doing)
        else:
            self._console.print(f"{self._doing}: {self._total} episodes", highlight=False, soft_wrap=True)

    def add(self) -> None:
        """Count one episode that has ended."""
        self.done += 1
        now = time.monotonic()
        if self._bar is not None:
            self._bar.advance(self._task)
        elif now - self._shown >= EVERY_S and self.done < self._total:
            self._shown = now
            left = (now - self._began) / self.done * (self._total - self.done)
            line = f"{self._doing}: {self.done}/{self._total} episodes, about {format_left(left)} left"
            self._console.print(line, highlight=False, soft_wrap=True)

    def say(self, what: str) -> None:
        """Print something that stays."""
        self._console.print(what, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> EpisodeCount:
        """Show the bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take the bar away; what it counted is said by the results."""
        if self._bar is not None:
            self._bar.stop()
