"""What to optimise: the ``algo`` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from agentrl.config.base import Section


class GrpoConfig(Section):
    """Group relative policy optimisation (DeepSeekMath, arXiv:2402.03300), without a reference policy."""

    name: Literal["grpo"] = "grpo"
    """The algorithm."""
    std_normalise: bool = True
    """Divide advantages by the standard deviation of their group's rewards."""
    std_eps: PositiveFloat = 1e-6
    """Added to that standard deviation, so that nearly equal rewards do not explode."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio of new to old probability gains nothing below ``1 - clip_low``."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio of new to old probability gains nothing above ``1 + clip_high``."""
    old_logprobs: Literal["sampler", "learner"] = "sampler"
    """Whose log-probabilities stand below the ratio: those the engine sampled with, or the learner's own of this step
    (the ratio is then 1 and nothing is clipped: the plain policy gradient)."""


AlgoConfig = GrpoConfig
"""The algorithms that ``algo.name`` chooses from; a union discriminated by ``name`` once there are several."""
