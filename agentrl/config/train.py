"""The ``run`` section, with folder and seed, the ``train`` section: length, evaluation and checkpoints; and ``async``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from agentrl.config.base import MAX_SECONDS, Section


class RunConfig(Section):
    """Where a run is stored, and its seed."""

    dir: Path | None = None
    """The run's folder; without it, ``runs/<environment>-<time>``."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of data order, episodes and sampling."""


class TrainConfig(Section):
    """Length, evaluation and checkpoints of training."""

    steps: int = Field(default=100, ge=0)
    """Steps, each with one batch of rollouts; 0 only evaluates (slime's ``num_rollout``)."""
    steps_per_rollout: PositiveInt = 1
    """Optimizer steps a batch of rollouts is divided into (slime's ``num_steps_per_rollout``)."""
    minutes: PositiveFloat | None = None
    """Stop after the step that passes this many minutes of training, evaluations not counted."""
    eval_every: int = Field(default=10, ge=0)
    """Steps between evaluations; 0: none between the first step and the last. After the last step there always is one."""
    eval_first: bool = True
    """Evaluate before the first step too, whatever ``eval_every`` is."""
    save_every: int = Field(default=10, ge=0)
    """Steps between checkpoints; 0: only after the last step."""
    keep: PositiveInt = 2
    """Newest checkpoints to keep."""
    save_episodes_s: float | None = Field(default=30.0, ge=0, le=MAX_SECONDS)
    """Seconds after which an episode in progress is saved to the journal, and again, so that a killed run goes on with it; null
    saves none. docs/checkpoints.md."""
    keep_best: str | None = None
    """An evaluation metric, such as ``exact_match``: the checkpoint where it is highest is kept too, and written even if
    ``save_every`` does not ask for it; null keeps the newest alone."""
    provenance: Literal["strict", "warn"] = "strict"
    """What follows if a batch would train on a token that no engine sampled: ``strict`` refuses the batch, which ends the
    run; ``warn`` logs the first such token, excludes all of them from the loss and counts them in
    ``train/provenance_faults``."""
    stop_at: dict[str, float] = Field(default_factory=dict)
    """End the run once an evaluation reaches all of these, such as ``{exact_match: 0.98}``."""


class AsyncConfig(Section):
    """Sampling while the learner trains."""

    max_staleness: int = Field(default=0, ge=0)
    """A trained token is at most so many policy versions older than the policy that it trains. 0 is the synchronous loop; 1
    samples one step ahead; more let long episodes take several steps. docs/async.md."""
    mask_older_than: int | None = Field(default=None, ge=0)
    """Tokens that are older than this many versions are not trained (loss mask 0, reason ``STALE``), and do not count in the
    denominators of the loss. null trains all of them, with ``algo.correction``."""
    streaming: bool = False
    """Compute the gradient of groups as they finish, while the others of the step are sampled; the optimizer step follows the
    last one. For estimators that compare the rollouts of a group alone. docs/async.md."""
