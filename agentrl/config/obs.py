"""The ``obs`` section: terminal output, trackers and recorded rollouts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from agentrl.config.base import Section


class ObsConfig(Section):
    """What a run shows and records."""

    tensorboard: bool = True
    """Write TensorBoard event files beside ``metrics.jsonl``."""
    rollouts: Literal["all", "first", "none"] = "all"
    """Which of a step's rollouts to write to ``rollouts/``: all, the first group of each step, or none."""
    rollout_format: Literal["jsonl", "parquet"] = "jsonl"
    """How rollouts lie on disk; parquet is made of the JSON lines once a step is whole."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Weights & Biases: off, online (wants a key), or offline for ``wandb sync`` later."""
    wandb_project: str = "agentrl"
    """The project of the run at Weights & Biases."""
    table_rows: int = Field(default=8, ge=0)
    """Rollouts of each step to show in the trackers' sample tables."""
    progress: Literal["auto", "live", "plain"] = "auto"
    """A live table, plain lines, or whichever fits the output."""
    stall_warning_s: float = Field(default=120.0, ge=0)
    """Seconds without progress before the run says what it waits for; it says so again after twice and four times as
    long. On SIGUSR1 it says so at once. 0 leaves it at that."""

    @field_validator("wandb", mode="before")
    @classmethod
    def _off(cls, value: object) -> object:
        """In YAML a bare ``off`` is the boolean."""
        return "off" if value is False else value
