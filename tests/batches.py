"""Batches and training steps as tests write them: plain arguments in place of `PackOptions`, `RowSignals` and `StepPart`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from agentrl.algo.estimate import RunEstimators
from agentrl.batch.groups import RolloutGroups
from agentrl.batch.microbatch import GlobalBatch, Kind
from agentrl.batch.packing import PackOptions, RowSignals, StepPart, pack
from agentrl.batch.sequences import RowValues
from agentrl.config.schema import Config
from agentrl.core.images import Image
from agentrl.core.types import Rollout, Row, RowKey
from agentrl.train.step_scores import StepScores, StepSettings, pack_options
from agentrl.train.training_step import TrainingStep

PAD = 0


def values_by_row(rows: Sequence[Row], values: Mapping[Any, Any] | None) -> RowValues | None:
    """Return ``[T]`` values of each row, of numbers or arrays by row or by ``rollout_id``; rows without any are left out."""
    if values is None:
        return None
    by_row = {row.key: values.get(row.key, values.get(row.key.rollout_id)) for row in rows}
    return {
        row.key: np.broadcast_to(np.asarray(by_row[row.key], np.float32), row.mask.shape)
        for row in rows
        if by_row[row.key] is not None
    }


def pack_rows(
    rows: Sequence[Row],
    advantages: Mapping[Any, Any] | None = None,
    *,
    kind: Kind = "rl",
    policy: str = "main",
    trained: Collection[str] | None = None,
    lr_scale: float = 1.0,
    units: int | None = None,
    completes: bool = True,
    gradient_scale: float = 1.0,
    learner_logprobs: Mapping[RowKey, Any] | None = None,
    correction: Mapping[RowKey, Any] | None = None,
    values: Mapping[RowKey, Any] | None = None,
    returns: Mapping[RowKey, Any] | None = None,
    images: Mapping[str, Image] | None = None,
    **options: Any,
) -> GlobalBatch:
    """Return rows as `pack` does; ``options`` are fields of `PackOptions`, advantages may be by ``rollout_id``."""
    signals = RowSignals(
        values_by_row(rows, advantages), learner_logprobs, correction, values, returns, images=images or {}
    )
    step_part = StepPart(units, completes, gradient_scale)
    packing = PackOptions(**options)
    return pack(
        rows,
        packing,
        signals,
        kind=kind,
        policy=policy,
        trained=trained,
        step_part=step_part,
        lr_scale=lr_scale,
    )


def training_step(
    config: Config, rollouts: Sequence[Rollout] | RolloutGroups, scores: StepScores | None = None, *, step: int = 0
) -> TrainingStep:
    """Return the training step of rollouts, with new estimators, after ``step`` finished ones."""
    if isinstance(rollouts, RolloutGroups):
        rollouts = rollouts.rollouts_N
    return TrainingStep(
        step_settings(config), RunEstimators(config.algo.by_source), step, rollouts, scores or StepScores()
    )


def step_settings(config: Config, epoch_steps: int | None = None) -> StepSettings:
    """Return the settings of a run's training steps."""
    return StepSettings(config, pack_options(config, PAD), epoch_steps)
