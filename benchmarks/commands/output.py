"""Output of the benchmarks: a table that is printed at the end, and progress until then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from agentrl.core.errors import ConfigError


@contextmanager
def open_table(console: Console, status: str, *heads: str) -> Iterator[tuple[Table, Callable[[str], None]]]:
    """Yield a table and a progress callback; print the table at the end, with the rows so far also after an error.

    Progress is a changing line in a terminal, which begins with ``status``, and a line for each call in a log.
    """
    table = Table(*(Column(head, no_wrap=True) for head in heads), box=SIMPLE, padding=(0, 0, 0, 1))
    try:
        with console.status(status) as line:
            yield table, (lambda text: line.update(Text(text))) if console.is_terminal else console.print
    finally:
        if table.row_count:
            console.print(table)


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
