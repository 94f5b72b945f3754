"""Supervised fine-tuning on a taskset's demonstrations: the ``sft`` section."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from agentrl.config.base import Section


class SftStage(Section):
    """A stage of the curriculum: so many steps on other options."""

    steps: PositiveInt
    """Optimizer steps of this stage."""
    tasks: dict[str, Any] = Field(default_factory=dict)
    """Laid over ``tasks.options``, such as ``{hops: [1]}``."""
    env: dict[str, Any] = Field(default_factory=dict)
    """Laid over ``env.options``, such as ``{topk: 1}``."""


class SftConfig(Section):
    """What to fine-tune on, and for how long."""

    steps: PositiveInt = 1000
    """Optimizer steps, those of the curriculum included."""
    minutes: PositiveFloat | None = None
    """Stop after the step that passes this many minutes, if that comes first."""
    batch_size: PositiveInt = 64
    """Demonstrated episodes a step."""
    context_weight: NonNegativeFloat = 0.3
    """Weight of the loss on what the policy reads, beside 1 for what the expert says."""
    lr_end: float = Field(default=0.1, ge=0, le=1)
    """The learning rate falls linearly to this share of ``learner.optimizer.lr``."""
    curriculum: list[SftStage] = Field(default_factory=list)
    """Stages that come first, in order; after them the options are as they stand."""
    reseed_option: str | None = None
    """Name of an integer option of the taskset that gets a new number with every world, such as ``seed``; without it,
    all demonstrations come from one world."""
    steps_per_world: PositiveInt = 4
    """Steps on one world before the next, where ``reseed_option`` is set."""
    seed: int = Field(default=1_000_000, ge=0)
    """Seed of the demonstrations; with ``reseed_option``, worlds are numbered from here on."""
    workers: int = Field(default=1, ge=0)
    """Processes that make demonstrations; 0 makes them in the driver. The data do not depend on it."""
    out: Path | None = None
    """Folder to write the finished policy to; without one, ``model`` in the run's folder."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the written weights."""
