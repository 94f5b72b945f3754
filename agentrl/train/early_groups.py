"""Groups of a training step that are computed before its batch is full, while the others are sampled (``async.streaming``)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from agentrl.algo.estimate import RowAdvantages
from agentrl.batch.groups import group_rollouts
from agentrl.batch.loss_weights import count_units
from agentrl.batch.microbatch import GlobalBatch
from agentrl.config.schema import Config
from agentrl.core.errors import LearnerError
from agentrl.core.types import Rollout
from agentrl.learner.base import LearnerGroup
from agentrl.learner.registry import make_backend
from agentrl.obs.waiting import PHASE, waiting
from agentrl.train.optimizer_steps import (
    OptimizerStep,
    StepScores,
    needs_scores,
    optimizer_steps,
    score_rollouts,
    step_advantages,
    step_batch,
)
from agentrl.train.step_metrics import merge_metrics

_TRAINED = "batch/trained_tokens"


@dataclass(slots=True)
class EarlyGroups:
    """Adds up the gradient of groups as they come. The batch of the others completes the optimizer step.

    How many tokens, sequences or rollouts share the loss is known only when the batch is full: until then weights are not
    divided by it, and the whole gradient is scaled at the end.
    """

    config: Config
    learner: LearnerGroup
    step: int
    """Finished training steps."""
    pad_id: int
    scores: StepScores = field(default_factory=StepScores)
    """Of the rollouts that were computed."""
    _waiting: list[Rollout] = field(default_factory=list)
    """Rollouts that are too few for a micro-batch of each share."""
    _computed: set[str] = field(default_factory=set)
    """Ids of the others."""
    _parts: list[dict[str, float]] = field(default_factory=list)
    """Metrics of their batches."""
    _seconds: float = 0.0
    _share: float = 0.0

    async def add(self, rollouts: Sequence[Rollout]) -> None:
        """Add finished groups of the step, and compute the gradient of all that wait if they fill micro-batches.

        Raises:
            LearnerError, ProvenanceError: see `LearnerGroup.train_step`.

        """
        self._waiting += rollouts
        tokens = sum(len(row.token_ids) for one in self._waiting for row in one.rows)
        if tokens >= self.config.batch.tokens_per_micro * make_backend(self.config.learner).shares:
            some, self._waiting = self._waiting, []
            with waiting(PHASE, f"step {self.step + 1}", "train"):
                await asyncio.to_thread(self._compute, some)

    def _compute(self, rollouts: Sequence[Rollout]) -> None:
        start, groups = time.perf_counter(), group_rollouts(rollouts)
        if needs_scores(self.config) and groups.rollouts_N:
            scores = score_rollouts(self.config, groups, self.learner, None, self.pad_id)
            self.scores = self.scores.joined(scores)
        advantages = step_advantages(self.config, groups, self.scores)
        for part in optimizer_steps(self.config, groups, advantages):
            batch = step_batch(
                self.config, self.step, part, advantages, self.scores, self.pad_id, units=1, completes=False
            )
            if self.learner.train_step(batch):
                raise LearnerError(
                    "the learner took an optimizer step for a part of a batch: it ignores `GlobalBatch.completes`; set "
                    "async.streaming=false"
                )
            self._parts.append(batch.metrics)
        self._computed.update(one.rollout_id for one in rollouts)
        self._seconds += time.perf_counter() - start

    def others(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts that were not computed."""
        return [one for one in rollouts if one.rollout_id not in self._computed]

    def last_batch(self, part: OptimizerStep, advantages: RowAdvantages, scores: StepScores) -> GlobalBatch:
        """Return the batch that completes the optimizer step, with the rows that were not computed.

        Args:
            part: the whole optimizer step.
            advantages: of all rows.
            scores: of all rows.

        """
        left = replace(part, rows=[row for row in part.rows if row.key.rollout_id not in self._computed])
        units = count_units(part.rows, self.config.batch.aggregation)
        batch = step_batch(
            self.config, self.step, left, advantages, scores, self.pad_id, units=1, gradient_scale=1 / units
        )
        early = sum(one[_TRAINED] for one in self._parts)
        merged = merge_metrics([*self._parts, batch.metrics])
        del merged["train/optimizer_steps"]
        self._share = early / max(1.0, merged[_TRAINED])
        batch.metrics = merged
        return batch

    def metrics(self) -> dict[str, float]:
        """Return the share of the trained tokens that were computed early, and the seconds that this took."""
        return {"async/early_share": self._share, "time/early_s": self._seconds}
