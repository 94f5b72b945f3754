"""What an evaluation is."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, PositiveInt

from agentrl.config.base import Section


class EvalSet(Section):
    """One set of tasks and how to sample on it. What a set under ``eval.sets`` leaves out is taken from ``eval``."""

    split: str | None = None
    """The split; without one ``tasks.eval_split``."""
    path: Path | None = None
    """A file of prompts, read as ``data`` says, in place of a split."""
    size: PositiveInt | None = None
    """Tasks, from the start of the split; without a number all of them."""
    n_samples: PositiveInt = 1
    """Episodes a task; pass@k is reported for powers of two up to it."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling."""
    top_k: int = -1
    """Top-k sampling; -1 keeps all."""
    max_new_tokens: PositiveInt | None = None
    """Tokens a turn may have; without a number ``sampler.max_new_tokens``."""
    pass_reward: float = 1.0
    """A sample passes (pass@k) where its reward is at least this."""
    by: str | None = None
    """A key of the tasks' metadata to report figures by, such as ``hops``."""


class EvalConfig(EvalSet):
    """How to evaluate."""

    sets: dict[str, EvalSet] = Field(default_factory=dict)
    """Several sets by name; without any there is one, which this section describes."""
