"""Learning-rate schedules: the factor of each optimizer step after the warm-up."""

from __future__ import annotations

import math

from agentrl.config.learner import OptimizerConfig, Schedule


def lr_scale(config: OptimizerConfig, share: float, steps: int, auto: Schedule) -> float:
    """Return the factor on the learning rate of an optimizer step: 1 until the warm-up ends, then the schedule's.

    Args:
        config: of the optimizer, with a number of warm-up steps.
        share: of the run's optimizer steps that came before, from 0 to 1.
        steps: optimizer steps of the run.
        auto: the schedule that ``auto`` stands for.
    """
    schedule = config.resolve_schedule(auto)
    if schedule == "constant":
        return 1.0
    warm = min(1.0, config.fixed_warmup_steps / steps)
    decayed = max(0.0, (share - warm) / (1 - warm)) if warm < 1 else 0.0
    remaining = 1 - decayed if schedule == "linear" else (1 + math.cos(math.pi * decayed)) / 2
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * remaining
