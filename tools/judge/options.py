"""Options of the judge."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from agentrl.config.base import Section


class JudgeOptions(Section):
    """``tools.judge.options``."""

    time_s: PositiveInt = 4
    """Seconds of CPU time that a program may use on a test, each of its processes for itself."""
    wall_s: PositiveFloat = 10.0
    """Seconds that a test may take by the clock: longer than ``time_s``, as other programs run beside it."""
    output_kb: PositiveInt = 1024
    """What a program may print on a test, KiB."""
    at_once: PositiveInt = 8
    """Programs judged at the same time; further ones wait."""
