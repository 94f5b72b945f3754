"""Options of the judge."""

from __future__ import annotations

from pydantic import PositiveInt

from agentrl.config.base import Seconds, Section


class JudgeOptions(Section):
    """``tools.judge.options``."""

    time_s: PositiveInt = 4
    """Seconds of CPU time of each of a program's processes on a test."""
    wall_s: Seconds = 10.0
    """Wall time of a test in seconds: longer than ``time_s``, because other programs share the processor."""
    output_kb: PositiveInt = 1024
    """Output of a program on a test, KiB."""
    at_once: PositiveInt = 8
    """Programs judged at the same time; further ones wait."""
