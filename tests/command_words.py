"""Command lines of processes that may end at any moment."""

from __future__ import annotations

import psutil


def command_words(process: psutil.Process) -> list[str]:
    """Return the words that started a process; none if it has ended, also if nothing has waited for it yet."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
