"""What the critic's optimizer steps of a training step train on, and their metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from agentrl.algo.base import RowValues
from agentrl.algo.estimate import estimate_returns
from agentrl.batch.groups import RolloutGroups, groups_by_source
from agentrl.batch.microbatch import GlobalBatch
from agentrl.batch.packing import pack
from agentrl.batch.sequences import sequences_of
from agentrl.config.schema import Config
from agentrl.core.types import RowKey
from agentrl.train.optimizer_steps import StepScores, advantage_input, divided, packing_options
from agentrl.train.step_metrics import merge_metrics

_NAMES = ("loss", "mean", "clip_fraction", "grad_norm", "lr", "nonfinite_gradients")
"""Metrics of the critic's optimizer steps that are logged, as ``train/value_…``."""


def warming_up(config: Config, step: int) -> bool:
    """Return whether the training step after ``step`` finished ones trains the critic alone."""
    return config.algo.needs_critic and step < config.algo.critic.warmup_steps


def returns_of(config: Config, groups: RolloutGroups, scores: StepScores) -> RowValues:
    """Return what the critic learns to predict for every trained token of a training step, by row; of sources with ``gae``."""
    found: dict[RowKey, NDArray[np.float32]] = {}
    for name, part in groups_by_source(groups, config.sources).items():
        algo = config.algo.by_source[name]
        found |= estimate_returns(algo, advantage_input(config, part, scores)) if algo.needs_critic else {}
    return found


def value_batches(
    config: Config, groups: RolloutGroups, scores: StepScores, returns: RowValues, pad_id: int
) -> list[GlobalBatch]:
    """Return the batches of the critic's optimizer steps, among which rollouts are divided as among those of the policy.

    Rollouts without an advantage are trained on too.
    """
    options = packing_options(config, pad_id)
    divisions = divided(config, groups)
    shares = [[row for one in rollouts for row in one.rows if row.key in returns] for rollouts in divisions]
    return [
        pack(rows, kind="value", values=scores.values, returns=returns, **options)
        for rows in shares
        if any(row.mask.any() for row in rows)
    ]


def value_metrics(
    steps: Sequence[Mapping[str, float]], groups: RolloutGroups, scores: StepScores, returns: RowValues
) -> dict[str, float]:
    """Return the critic's metrics of a training step: those of its optimizer steps, and how good its values were before.

    The explained variance is ``1 - Var(R - V) / Var(R)`` over all trained tokens; it is left out if all returns are equal.
    """
    merged = merge_metrics(steps)
    found = {f"train/value_{name}": merged[f"train/{name}"] for name in _NAMES if f"train/{name}" in merged}
    sequences = sequences_of(row for row in groups.rows if row.key in returns)
    returns_N, values_N = (
        np.concatenate([np.zeros(0), *(sequence.gather(given) for sequence in sequences)])
        for given in (returns, scores.values)
    )
    if len(returns_N) and np.ptp(returns_N):
        found["train/value_explained_variance"] = float(1 - np.var(returns_N - values_N) / np.var(returns_N))
    return found
