"""The ``train`` section: length, evaluation and checkpoints of training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from agentrl.config.base import Section


class TrainConfig(Section):
    """How long to train, and what to keep."""

    steps: int = Field(default=100, ge=0)
    """Steps, each of one batch of rollouts; 0 only evaluates (slime's ``num_rollout``)."""
    steps_per_rollout: PositiveInt = 1
    """Optimizer steps a batch of rollouts is divided into (slime's ``num_steps_per_rollout``)."""
    minutes: PositiveFloat | None = None
    """Stop after the step that passes this many minutes of training, evaluations not counted."""
    eval_every: int = Field(default=10, ge=0)
    """Evaluate every so many steps; 0 only after the last."""
    eval_first: bool = True
    """Evaluate before the first step too."""
    save_every: int = Field(default=10, ge=0)
    """Write a checkpoint every so many steps; 0 only after the last."""
    keep: PositiveInt = 2
    """Checkpoints to keep."""
    provenance: Literal["strict", "warn"] = "strict"
    """What follows where a batch would train on a token that no engine sampled: ``strict`` refuses the batch, which ends
    the run; ``warn`` logs the first one, leaves all of them out of the loss and counts them in
    ``train/provenance_faults``."""
    stop_at: dict[str, float] = Field(default_factory=dict)
    """End the run once an evaluation reaches all of these, such as ``{exact_match: 0.98}``."""
