"""The reward function."""

from __future__ import annotations

from typing import Literal

from agentrl.config.base import Seconds, Section


class RewardConfig(Section):
    """A reward function in place of the environment's own. ``reward=F`` is short for ``reward.function=F``."""

    function: str | None = None
    """``module:function``, ``file.py:function``, or built in: exact_match, f1, numeric, math, squad_exact_match, squad_f1."""
    key: str | None = None
    """The key of the reward if the function returns a mapping; the other keys become metrics."""
    on_error: Literal["stop", "drop", "score"] = "stop"
    """What follows when the function raises or returns no finite number: stop the run, drop the sample, or score it."""
    error_score: float = 0.0
    """The reward of such a sample with ``on_error=score``."""
    timeout_s: Seconds = 60.0
    """Timeout of a call, seconds."""
