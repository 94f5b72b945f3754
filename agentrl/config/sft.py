"""Supervised fine-tuning on a taskset's demonstrations: the ``sft`` section."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from agentrl.config.base import Section


class SftStage(Section):
    """A stage of the curriculum: a number of steps with other options."""

    steps: PositiveInt
    """Optimizer steps of this stage."""
    tasks: dict[str, Any] = Field(default_factory=dict)
    """Merged over ``tasks.options``, such as ``{hops: [1]}``."""
    env: dict[str, Any] = Field(default_factory=dict)
    """Merged over ``env.options``, such as ``{topk: 1}``."""


class SftConfig(Section):
    """Length, data and output of supervised fine-tuning."""

    steps: PositiveInt = 1000
    """Optimizer steps, those of the curriculum included."""
    minutes: PositiveFloat | None = None
    """Stop after the step that passes this many minutes, if that comes first."""
    batch_size: PositiveInt = 64
    """StepDemonstrations episodes per step."""
    context_weight: NonNegativeFloat = 0.3
    """Weight of the loss on observed tokens, relative to 1 on the expert's."""
    curriculum: list[SftStage] = Field(default_factory=list)
    """Stages before the rest of the run, in order; after them the configured options are used."""
    reseed_option: str | None = None
    """Name of an integer option of the taskset, such as ``seed``, that is set to a new number for every world; without it,
    all demonstrations come from one world."""
    steps_per_world: PositiveInt = 4
    """Steps per world if ``reseed_option`` is set."""
    seed: int = Field(default=1_000_000, ge=0, lt=2**31)
    """Seed of the demonstrations; with ``reseed_option``, the number of the first world."""
    workers: int = Field(default=1, ge=0)
    """Processes that make demonstrations; 0: the driver does. The data do not depend on it."""
    out: Path | None = None
    """New or empty folder to write the finished policy to; without one, ``model`` in the run's folder."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the written weights."""
