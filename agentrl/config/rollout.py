"""The ``rollout`` section: how episodes are run, and what follows when one fails."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from agentrl.config.base import Section

FailureAction = Literal["train", "drop", "retry", "stop"]
"""``train`` on the episode with the reward it has, ``drop`` it, ``retry`` it from its start, or ``stop`` the run."""


class FailureConfig(Section):
    """What follows when an episode fails, by where the error arose: train, drop, retry or stop."""

    sampler: FailureAction = "retry"
    """The engine, or the way to it, failed."""
    environment: FailureAction = "drop"
    """The environment's own code raised."""
    tool: FailureAction = "retry"
    """A tool or its server failed for reasons of its own."""
    sandbox: FailureAction = "retry"
    """A sandbox failed for reasons of its own."""
    task: FailureAction = "drop"
    """The task itself is unusable, such as a prompt longer than ``rollout.max_tokens``."""
    max_retries: NonNegativeInt = 2
    """Further attempts at an episode whose action is ``retry``; after the last one it is dropped."""
    max_failed_share: float = Field(default=0.5, ge=0, le=1)
    """Stop the run when a larger share of a step's episodes is dropped: the fault is then no single episode's."""


class RolloutConfig(Section):
    """How episodes are run."""

    batch_size: PositiveInt = 32
    """Prompts a step (slime's ``rollout_batch_size``)."""
    n_samples_per_prompt: PositiveInt = 8
    """Episodes a prompt: the group that advantages are computed over."""
    max_turns: PositiveInt = 8
    """Turns an episode may have, those of its subagents included."""
    max_tokens: PositiveInt = 1024
    """Tokens that the policy may have before it at once, its answer included: prompt, turns and observations of one
    conversation."""
    max_seconds: PositiveFloat = 300.0
    """Seconds an episode may take."""
    concurrency: PositiveInt = 256
    """Episodes that run at the same time."""
    failure: FailureConfig = Field(default_factory=FailureConfig)
    """What follows when an episode fails, by where the error arose."""
    generate: str | None = None
    """A multi-turn loop of your own in place of environment and runner: ``module:function`` or ``file.py:function``."""
