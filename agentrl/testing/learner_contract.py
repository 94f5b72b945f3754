"""Contract check of learners, for the tests of backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentrl.batch.loss_weights import count_units
from agentrl.batch.microbatch import GlobalBatch
from agentrl.batch.packing import WHOLE_STEP, PackOptions, RowSignals, StepPart, pack
from agentrl.core.errors import LearnerError
from agentrl.core.types import Row, RowKey
from agentrl.learner.base import LearnerGroup, LearnerRank, RowLogprobs
from agentrl.testing.contract import require

TrainedLearner: TypeAlias = LearnerRank | LearnerGroup
_TOLERANCE = 1e-3
"""Tolerance of log-probabilities after the same gradient was added up in another order."""


def check_learner(make_learner: Callable[[], TrainedLearner], rows: Sequence[Row], folder: Path) -> None:
    """Check a learner of one data-parallel rank against the contract of `LearnerRank`.

    Log-probabilities come by row. A step changes them, and parts of a batch change them as the whole batch does. A gradient
    that is not finite skips the step and is reported. A checkpoint, and sleep and wake, restore the same bits.

    Example::

        check_learner(lambda: BigramRank(10_000, objective), [*first.rows, *second.rows], tmp_path)

    Args:
        make_learner: makes a learner with the same weights each time; the one before has been closed.
        rows: of two or more rollouts, each with tokens to train on, at temperature 1.
        folder: empty; checkpoints are written there.

    Raises:
        ContractError: a rule is violated; the message has what the learner does and what it should.
    """
    contract = _Contract(make_learner, rows)
    with closing(make_learner()) as learner:
        contract.check_logprobs(learner)
        contract.check_nonfinite_gradient(learner)
        contract.check_sleep(learner)
        contract.check_reference(learner)
    contract.check_parts()
    contract.check_checkpoint(folder / "checkpoint")


class _Contract:
    def __init__(self, make_learner: Callable[[], TrainedLearner], rows: Sequence[Row]) -> None:
        self._make_learner = make_learner
        self._rows = rows
        self._rollouts = list(dict.fromkeys(row.key.rollout_id for row in rows))
        assert len(self._rollouts) > 1, "parts of a batch are rollouts"
        self._batch = self._pack(rows)

    def _pack(self, rows: Sequence[Row], *, scale: float = 1.0, step_part: StepPart = WHOLE_STEP) -> GlobalBatch:
        """Return a batch whose rollouts have advantages of both signs."""
        longest = max(len(row.token_ids) for row in self._rows)
        advantages = {
            row.key: np.full(len(row.mask), scale * (-1) ** self._rollouts.index(row.key.rollout_id), np.float32)
            for row in rows
        }
        return pack(rows, PackOptions(tokens_per_micro=longest), RowSignals(advantages), step_part=step_part)

    def check_logprobs(self, learner: TrainedLearner) -> None:
        logprobs = learner.logprobs(self._batch)
        require(
            set(logprobs) == {row.key for row in self._rows},
            f"logprobs must return the rows of the batch, it returns {sorted(logprobs)}",
        )
        for row in self._rows:
            scores_T = logprobs[row.key]
            fits = scores_T.dtype == np.float32 and scores_T.shape == row.mask.shape and scores_T[0] == 0
            require(
                fits and bool(np.isfinite(scores_T).all()) and bool((scores_T <= _TOLERANCE).all()),
                f"logprobs of {row.key} must be float32 [{len(row.mask)}], finite, at most 0, and 0 for the first token: "
                f"{scores_T!r:.200}",
            )
        try:
            learner.logprobs(self._batch, "no such policy")
        except LearnerError:
            return
        require(False, "logprobs of an unknown policy must raise LearnerError")

    def check_parts(self) -> None:
        with closing(self._make_learner()) as learner:
            start = learner.logprobs(self._batch)
            _require_step(learner.train_step(self._batch), nonfinite=0.0)
            stepped = learner.logprobs(self._batch)
            require(not _same_bits(start, stepped), "an optimizer step must change the log-probabilities")
        with closing(self._make_learner()) as learner:
            for rollout_id in self._rollouts:
                completes = rollout_id == self._rollouts[-1]
                scale = 1 / count_units(self._rows, "token_mean") if completes else 1.0
                part_rows = [row for row in self._rows if row.key.rollout_id == rollout_id]
                part = self._pack(part_rows, step_part=StepPart(1, completes, scale))
                metrics = learner.train_step(part)
                if completes:
                    _require_step(metrics, nonfinite=0.0)
                else:
                    require(metrics == {}, f"a part that does not complete a step has no metrics, it has {metrics}")
                    require(
                        _same_bits(start, learner.logprobs(self._batch)),
                        "a part that does not complete a step must leave the weights as they are",
                    )
            difference = _difference(stepped, learner.logprobs(self._batch))
            require(
                difference < _TOLERANCE,
                f"a step in parts must change the weights as the whole step does: log-probabilities differ by {difference:g}",
            )

    def check_nonfinite_gradient(self, learner: TrainedLearner) -> None:
        start = learner.logprobs(self._batch)
        _require_step(learner.train_step(self._pack(self._rows, scale=float("inf"))), nonfinite=1.0)
        require(
            _same_bits(start, learner.logprobs(self._batch)),
            "a gradient that is not finite must leave the weights as they are",
        )
        _require_step(learner.train_step(self._batch), nonfinite=0.0)

    def check_sleep(self, learner: TrainedLearner) -> None:
        learner.train_step(self._batch)
        awake = learner.logprobs(self._batch)
        for _ in range(2):
            learner.sleep()
        for call in (learner.train_step, learner.logprobs):
            try:
                call(self._batch)
            except LearnerError:
                continue
            require(False, f"{call.__name__} of a sleeping learner must raise LearnerError")
        for _ in range(2):
            learner.wake()
        require(_same_bits(awake, learner.logprobs(self._batch)), "sleep and wake must restore the same weights")
        _require_step(learner.train_step(self._batch), nonfinite=0.0)

    def check_reference(self, learner: TrainedLearner) -> None:
        learner.train_step(self._batch)
        try:
            learner.logprobs(self._batch, "reference")
        except LearnerError:
            try:
                learner.update_reference()
            except LearnerError:
                return
            require(False, "update_reference must raise LearnerError without a reference policy")
        learner.update_reference()
        difference = _difference(learner.logprobs(self._batch), learner.logprobs(self._batch, "reference"))
        require(
            difference < _TOLERANCE,
            f"update_reference must make the reference a copy of the policy: log-probabilities differ by {difference:g}",
        )

    def check_checkpoint(self, folder: Path) -> None:
        with closing(self._make_learner()) as learner:
            learner.train_step(self._batch)
            saved = learner.logprobs(self._batch)
            learner.save(folder)
            learner.train_step(self._batch)  # while the checkpoint is written
            learner.finish_save()
            continued = learner.logprobs(self._batch)
        with closing(self._make_learner()) as learner:
            learner.load(folder)
            require(_same_bits(saved, learner.logprobs(self._batch)), "load must restore the weights that were saved")
            learner.train_step(self._batch)
            require(
                _same_bits(continued, learner.logprobs(self._batch)),
                "a step after load must be that after save: the optimizer's state belongs to a checkpoint",
            )


def _require_step(metrics: Mapping[str, float], *, nonfinite: float) -> None:
    reported = metrics.get("train/nonfinite_gradients")
    require(reported == nonfinite, f"train/nonfinite_gradients of this step must be {nonfinite}, it is {reported}")


def _same_bits(first: RowLogprobs, second: RowLogprobs) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[key], second[key]) for key in first)


def _difference(first: Mapping[RowKey, NDArray[np.float32]], second: Mapping[RowKey, NDArray[np.float32]]) -> float:
    return max(float(np.abs(first[key] - second[key]).max()) for key in first)
