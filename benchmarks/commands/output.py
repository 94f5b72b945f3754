"""Output of the benchmarks: rows as they are measured, a table of them at the end, and progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from agentrl.core.errors import ConfigError


class ResultTable:
    """A table that prints each row as soon as it is added, on a line with the columns' names."""

    def __init__(self, console: Console, heads: Sequence[str]) -> None:
        self.table = Table(*(Column(head, no_wrap=True) for head in heads), box=SIMPLE, padding=(0, 0, 0, 1))
        self._console = console
        self._heads = heads

    def add_row(self, *cells: str) -> None:
        """Add a row, a text for each column."""
        line = ", ".join(f"{head} {cell}" for head, cell in zip(self._heads, cells, strict=True) if cell)
        self._console.print(Text(line), soft_wrap=True)
        self.table.add_row(*cells)


@contextmanager
def open_table(console: Console, status: str, *heads: str) -> Iterator[tuple[ResultTable, Callable[[str], None]]]:
    """Yield a table and a progress callback; print the whole table at the end, with the rows so far also after an error.

    Progress is a changing line in a terminal, which begins with ``status``, and a line for each call in a log, after the seconds
    since the start.
    """
    rows, begun = ResultTable(console, heads), time.monotonic()
    try:
        with console.status(status) as line:

            def progress(text: str) -> None:
                timed = Text(f"{time.monotonic() - begun:4.0f} s: {text}")
                line.update(timed) if console.is_terminal else console.print(timed, soft_wrap=True)

            yield rows, progress
    finally:
        if rows.table.row_count > 1:
            console.print(rows.table)


def split_names(text: str) -> list[str]:
    """Return the parts of a comma-separated list that are not empty."""
    return [name for name in text.split(",") if name]


def split_numbers(text: str, option: str) -> list[int]:
    """Return the numbers of a comma-separated list.

    Raises:
        ConfigError: a part is no whole number; the message names ``option``.
    """
    try:
        return [int(number) for number in split_names(text)]
    except ValueError:
        raise ConfigError(f"{option}={text}: numbers, separated by commas") from None
