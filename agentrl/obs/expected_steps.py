"""How many steps a run is expected to have, from its configuration and what it has logged."""

from __future__ import annotations

import math

from agentrl.config.train import TrainConfig


def expected_steps(config: TrainConfig, step: int, epoch: float | None) -> int:
    """Return the expected number of steps: ``train.steps``, or as many as the rest of ``train.epochs`` takes at the same pace.

    Args:
        config: of the run.
        step: finished steps.
        epoch: the newest ``data/epoch``; None if none was logged.
    """
    counts = [] if config.steps is None else [config.steps]
    if config.epochs is not None and epoch:
        counts.append(math.ceil(step * max(1.0, config.epochs / epoch)))
    return max(step, min(counts, default=step))
