"""The console that every command prints to.

In a terminal, text wraps at the terminal's width and rollouts are shown in panels. Output to a file or a pipe is read by
programs and by people with ``grep`` and ``less``: there one line stays one line, tables are as wide as their content,
and nothing is drawn around text.
"""

from __future__ import annotations

import sys

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.text import Text

UNWRAPPED_WIDTH = 10_000
"""Columns of a console whose output is not a terminal: wider than any table."""


def make_console(*, stderr: bool = False) -> Console:
    """Return a console for standard output or standard error that wraps lines only if that is a terminal.

    Without a terminal Rich would assume 80 columns, also if colours are forced with ``FORCE_COLOR``.
    """
    if (sys.stderr if stderr else sys.stdout).isatty():
        return Console(stderr=stderr)
    return Console(stderr=stderr, width=UNWRAPPED_WIDTH, soft_wrap=True)


class TitledBlock:
    """Text under a title: a panel in a terminal, the title on a line above the text in other output."""

    def __init__(self, title: str, *parts: RenderableType) -> None:
        self._title = Text(title)
        self._content = Group(*parts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the panel, or the title and the parts if lines are not wrapped."""
        if options.max_width >= UNWRAPPED_WIDTH:
            yield self._title
            yield self._content
        else:
            yield Panel(self._content, title=self._title, title_align="left", border_style="blue")
