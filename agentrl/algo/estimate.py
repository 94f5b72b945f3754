"""Advantages of a training step: penalties, estimator, and what the loss needs of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.algo.advantages.gae import gae_returns
from agentrl.algo.advantages.rae import updated_baselines
from agentrl.algo.base import AdvantageInput, Advantages, RoleBaseline, RowValues
from agentrl.algo.overlong import with_penalties
from agentrl.algo.registry import make_estimator
from agentrl.batch.sequences import sampled_sequences
from agentrl.config.algo import ADVANTAGES, AlgoConfig, GaeAdvantage, RaeAdvantage, parse_options
from agentrl.core.errors import ConfigError
from agentrl.core.types import Rollout, Row, RowKey

RowAdvantages = dict[RowKey, NDArray[np.float32]]
"""By row: ``[T]``, 0 at tokens that are not trained."""


def estimate_advantages(
    config: AlgoConfig, given: AdvantageInput, teacher_gaps: RowValues | None = None
) -> RowAdvantages:
    """Return the advantage of every trained token of a training step.

    Args:
        config: of the objective.
        given: the rollouts, and what the estimator needs of them.
        teacher_gaps: of every row, if there are teachers; see `agentrl.algo.distillation`.

    Raises:
        ConfigError: the rewards do not fit the estimator, or it returned no finite number for a rollout.

    """
    given = _penalised(config, given)
    found = make_estimator(config.advantage)(given) if config.needs_reward else None
    advantages: RowAdvantages = {}
    for rollout in given.groups.rollouts_N:
        of_rows = {row.key: _of_row(found, rollout, row, config.advantage.name) for row in rollout.rows}
        if teacher_gaps is not None:
            reward_coef, coef = config.distillation.reward_coef, config.distillation.coef
            of_rows = {key: reward_coef * values - coef * teacher_gaps[key] for key, values in of_rows.items()}
        for sequence in sampled_sequences(rollout):
            values_S = sequence.gather(of_rows)
            if config.loss.name == "gspo" and len(values_S):  # its objective has one advantage a sequence
                values_S[:] = values_S.mean() if np.ptp(values_S) else values_S
            advantages |= sequence.scatter(values_S)
    return advantages


def estimate_returns(config: AlgoConfig, given: AdvantageInput) -> RowValues:
    """Return what the critic learns to predict for every trained token; see `gae_returns`."""
    options = parse_options("algo.advantage", config.advantage, ADVANTAGES)
    assert isinstance(options, GaeAdvantage), "only gae has a critic"
    return gae_returns(_penalised(config, given), options)


def next_baselines(config: AlgoConfig, given: AdvantageInput) -> Mapping[str, RoleBaseline]:
    """Return the baselines after a training step; those before it if the estimator has none. See `updated_baselines`."""
    if config.advantage.name != "rae":
        return given.baselines
    options = parse_options("algo.advantage", config.advantage, ADVANTAGES)
    assert isinstance(options, RaeAdvantage), "by its name"
    return updated_baselines(_penalised(config, given), options)


class RunEstimators:
    """The advantage estimators of a run, with their state.

    Args:
        algorithms: of each source of a mixed run by name; of other runs the only one, by ``""``.

    """

    def __init__(self, algorithms: Mapping[str, AlgoConfig]) -> None:
        self._algorithms = algorithms
        self._baselines: dict[str, Mapping[str, RoleBaseline]] = {}
        """The baselines of ``rae`` before the next step, by source."""

    def advantages(self, source: str, inputs: AdvantageInput, teacher_gaps: RowValues | None = None) -> RowAdvantages:
        """Return the advantage of every trained token of a source's rollouts; see `estimate_advantages`."""
        return estimate_advantages(self._algorithms[source], self._with_baselines(source, inputs), teacher_gaps)

    def returns(self, source: str, inputs: AdvantageInput) -> RowValues:
        """Return what the critic learns to predict for every trained token of a source's rollouts."""
        return estimate_returns(self._algorithms[source], inputs)

    def update(self, inputs_by_source: Iterable[tuple[str, AdvantageInput]]) -> None:
        """Update the state after a training step with its rollouts."""
        for source, inputs in inputs_by_source:
            self._baselines[source] = next_baselines(self._algorithms[source], self._with_baselines(source, inputs))

    def _with_baselines(self, source: str, inputs: AdvantageInput) -> AdvantageInput:
        return replace(inputs, baselines=self._baselines.get(source, {}))

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, JSON-able."""
        return {source: dict(baselines) for source, baselines in self._baselines.items() if baselines}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the return value of `state`, which JSON has with lists."""
        self._baselines = {
            source: {key: RoleBaseline(*baseline) for key, baseline in baselines.items()}
            for source, baselines in state.items()
        }

    def metrics(self) -> dict[str, float]:
        """Return each baseline, as ``self_play/baseline/ROLE/OPPONENTS``, in a mixed run with the source before the role."""
        return {
            "/".join(["self_play/baseline", *filter(None, [source, *key.split("/")])]): baseline.value
            for source, baselines in self._baselines.items()
            for key, baseline in baselines.items()
        }


def _penalised(config: AlgoConfig, given: AdvantageInput) -> AdvantageInput:
    return replace(given, groups=with_penalties(given.groups, config.overlong))


def _of_row(found: Advantages | None, rollout: Rollout, row: Row, name: str) -> NDArray[np.float32]:
    """Return the advantages of a row's tokens, of which those that are not trained are any number; None are zeros."""
    if found is None:
        return np.zeros(row.mask.shape, np.float32)
    by_key: dict[object, object] = found  # type: ignore[assignment]
    value = by_key.get(row.key, by_key.get(row.key.rollout_id))
    if value is None:
        raise ConfigError(f"algo.advantage.name={name} returned no advantage for rollout {rollout.rollout_id!r}")
    values = np.broadcast_to(np.asarray(value, np.float32), row.mask.shape)
    if not np.isfinite(values[row.mask.astype(bool)]).all():
        raise ConfigError(
            f"algo.advantage.name={name}: an advantage of rollout {rollout.rollout_id!r}, with reward {rollout.reward:g}, is "
            "not finite"
        )
    return values


def mean_advantages(advantages: RowAdvantages) -> dict[str, float]:
    """Return the mean of each rollout's advantages that are not 0, by ``rollout_id``; 0 without any."""
    sums: dict[str, list[float]] = {}
    for key, values in advantages.items():
        sums.setdefault(key.rollout_id, []).extend(values[values != 0].tolist())
    return {rollout_id: float(np.mean(values)) if values else 0.0 for rollout_id, values in sums.items()}
