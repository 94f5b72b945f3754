"""Groups of a training step that are computed before its batch is full, while the others are sampled (``async.streaming``)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from agentrl.algo.estimate import RunEstimators
from agentrl.batch.loss_weights import count_units
from agentrl.batch.microbatch import GlobalBatch
from agentrl.batch.packing import StepPart
from agentrl.core.errors import LearnerError
from agentrl.core.types import Rollout
from agentrl.learner.base import LearnerGroup
from agentrl.obs.waiting import PHASE, waiting
from agentrl.train.step_metrics import merge_metrics
from agentrl.train.step_scores import StepScores, score_rollouts
from agentrl.train.step_settings import StepSettings
from agentrl.train.training_step import OptimizerStep, TrainingStep

_TRAINED = "batch/trained_tokens"


@dataclass(slots=True)
class EarlyGroups:
    """Adds up the gradient of groups as they finish. The batch of the remaining groups completes the optimizer step.

    How many tokens, sequences or rollouts share the loss is known only when the batch is full: until then weights are not
    divided by it, and the whole gradient is scaled at the end.
    """

    settings: StepSettings
    estimators: RunEstimators
    learner: LearnerGroup
    step: int
    """Training steps that were finished before."""
    scores: StepScores = field(default_factory=StepScores)
    """Of the rollouts that were computed."""
    _waiting: list[Rollout] = field(default_factory=list)
    """Rollouts that are too few for a micro-batch of each rank."""
    _computed: set[str] = field(default_factory=set)
    """Ids of the rollouts that were computed."""
    _batch_metrics: list[Mapping[str, float]] = field(default_factory=list)
    """Of their batches."""
    _seconds: float = 0.0
    _token_share: float = 0.0

    async def add(self, rollouts: Sequence[Rollout]) -> None:
        """Add finished groups of the step, and compute the gradient of all that wait if they fill micro-batches.

        Raises:
            LearnerError, ProvenanceError: see `LearnerGroup.train_step`.
        """
        self._waiting += rollouts
        tokens = sum(len(row.token_ids) for rollout in self._waiting for row in rollout.rows)
        packing = self.settings.packing
        if tokens >= packing.tokens_per_micro * packing.data_parallel_size:
            ready, self._waiting = self._waiting, []
            with waiting(PHASE, f"step {self.step + 1}", "train"):
                await asyncio.to_thread(self._compute, ready)

    def _compute(self, rollouts: Sequence[Rollout]) -> None:
        start, early_step = time.perf_counter(), TrainingStep(self.settings, self.estimators, self.step, rollouts)
        if self.settings.needs_scores and early_step.groups.rollouts_N:
            self.scores = self.scores.merge(score_rollouts(self.settings, early_step.groups, self.learner))
        early_step.scores = self.scores
        for optimizer_step in early_step.optimizer_steps():
            batch = early_step.policy_batch(optimizer_step, StepPart(units=1, completes=False))
            if self.learner.train_step(batch):
                raise LearnerError(
                    "the learner took an optimizer step for a part of a batch: it ignores `GlobalBatch.completes`; set "
                    "async.streaming=false"
                )
            self._batch_metrics.append(batch.metrics)
        self._computed.update(rollout.rollout_id for rollout in rollouts)
        self._seconds += time.perf_counter() - start

    def remaining(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts that were not computed."""
        return [rollout for rollout in rollouts if rollout.rollout_id not in self._computed]

    def last_batch(self, training_step: TrainingStep, optimizer_step: OptimizerStep) -> GlobalBatch:
        """Return the batch that completes an optimizer step, with the rows that were not computed."""
        units = count_units(training_step.rows(optimizer_step.counted), self.settings.packing.aggregation)
        batch = training_step.policy_batch(optimizer_step, StepPart(units=1, gradient_scale=1 / units), self._computed)
        early_tokens = sum(metrics[_TRAINED] for metrics in self._batch_metrics)
        metrics = merge_metrics([*self._batch_metrics, batch.metrics])
        del metrics["train/optimizer_steps"]
        self._token_share = early_tokens / max(1.0, metrics[_TRAINED])
        return replace(batch, metrics=metrics)

    def metrics(self) -> dict[str, float]:
        """Return the share of the trained tokens that were computed early, and the seconds that this took."""
        return {"async/early_share": self._token_share, "time/early_s": self._seconds}
