"""Consoles of the command line: the one way in which text reaches a terminal or a log.

Text is never read as markup, and only printable characters are written, whatever their origin: ids of tasks, names of metrics,
paths, what a policy samples. Output that is not a terminal is read by people with ``grep`` and ``less``: there one line stays
one line, tables are as wide as their content, nothing is drawn around text, and messages have the time.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from typing import IO, Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.segment import Segment
from rich.text import Text

from agentrl.config.secret_values import hide_secrets

UNWRAPPED_WIDTH = 10_000
"""Columns of a console whose output is not a terminal: wider than any table."""
_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories: controls, format characters such as those that change the direction of text, halves of characters, and
separators of lines and paragraphs."""
_JOINERS = "\u200c\u200d"
"""Format characters that emoji and some scripts need. They join their neighbours and change nothing else."""


def printable(text: str, *, lines: bool = True) -> str:
    """Return text with unprintable characters replaced by pictures, such as ``␛`` for escape.

    With ``lines``, line ends and tabs are kept.
    """
    if text.isprintable():
        return text
    allowed = _JOINERS + "\n\t" if lines else _JOINERS
    return "".join(
        character
        if character in allowed or unicodedata.category(character) not in _UNPRINTABLE
        else _picture(character)
        for character in text
    )


def _picture(character: str) -> str:
    return chr(0x2400 + ord(character)) if ord(character) < 0x20 else "␦"


OUTPUT_CLOSED = "standard output was closed, by the command that it is piped to"
"""Why a command ends with an `OutputClosedError`."""


class OutputClosedError(BrokenPipeError):
    """The command that this one's output is piped to, such as ``head``, has closed it."""


class _PlainConsole(Console):
    """A console that reads no markup and writes printable characters only; styles are those of the program."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield segments of printable text, and the terminal controls of rich itself."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string as text, without what looks like a secret; its width is measured with its pictures."""
        return super().render_str(printable(hide_secrets(text)), **options)

    def on_broken_pipe(self) -> None:
        """Raise `OutputClosedError`; nothing is written any more."""
        with suppress(SystemExit):
            super().on_broken_pipe()
        raise OutputClosedError(errno.EPIPE, os.strerror(errno.EPIPE))


def make_console(*, stderr: bool = False, file: IO[str] | None = None) -> Console:
    """Return a console for standard output, standard error or a file that wraps lines only if that is a terminal.

    Without a terminal Rich would assume 80 columns, also if colours are forced with ``FORCE_COLOR``, which
    the kernel of a notebook sets: its output is no terminal in which lines can be replaced.
    """
    plain: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False, "stderr": stderr, "file": file}
    plain["force_jupyter"] = False  # a notebook gets the same lines, in their order
    if "ipykernel" in sys.modules:
        plain["force_terminal"] = False
    if (file or (sys.stderr if stderr else sys.stdout)).isatty():
        return _PlainConsole(**plain)
    return _PlainConsole(width=UNWRAPPED_WIDTH, soft_wrap=True, **plain)


def print_message(console: Console, message: str, style: str = "") -> None:
    """Print a message of a command at work; never wrapped, and with the time if the output is not a terminal."""
    time = "" if console.is_terminal else f"{datetime.now():%Y-%m-%d %H:%M:%S} "
    console.print(Text.assemble(time, (hide_secrets(message), style)), soft_wrap=True)


def print_error(console: Console, kind: str, message: object, style: str = "bold red") -> None:
    """Print why a command ends, never wrapped: what kind of end it is, in a style, and the message."""
    console.print(Text.assemble((f"{kind}:", style), f" {hide_secrets(str(message))}"), soft_wrap=True)


class _PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(hide_secrets(super().format(record)))


def log_to_stderr() -> None:
    """Write log records to standard error, with the time if that is not a terminal; once in a process."""
    time = "" if sys.stderr.isatty() else "%(asctime)s "
    handler = logging.StreamHandler()
    handler.setFormatter(_PlainFormatter(f"{time}%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)


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
