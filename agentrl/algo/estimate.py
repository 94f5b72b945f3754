"""Advantages of a training step: penalties, estimators with their state, and what the loss needs of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.algo.base import AdvantageEstimator, AdvantageInput, Advantages, RowValues
from agentrl.algo.registry import ADVANTAGE_KEY, calling_algorithm, loss_class, make_estimator
from agentrl.algo.reward_processing import shape_rewards
from agentrl.batch.groups import RolloutGroups
from agentrl.batch.sequences import sampled_sequences
from agentrl.config.algo import AlgoConfig
from agentrl.core.errors import ConfigError, UngradedError
from agentrl.core.types import Rollout, Row, RowKey

RowAdvantages = dict[RowKey, NDArray[np.float32]]
"""By row: ``[T]``, 0 at tokens that are not trained."""


class RunEstimators:
    """The advantage estimators of a run with their state, one for each source of tasks.

    Args:
        algorithms: of each source of a mixed run by name; of other runs the only one, by ``""``.

    Raises:
        ConfigError, UnknownNameError: as of `agentrl.algo.registry.make_estimator`.
    """

    def __init__(self, algorithms: Mapping[str, AlgoConfig]) -> None:
        self._algos = algorithms
        self._estimators = {source: make_estimator(algo.advantage) for source, algo in self._algos.items()}

    def shape_rewards(self, source: str, groups: RolloutGroups) -> RolloutGroups:
        """Return a source's groups with the rewards that the other methods need: penalties, and ``algo.reward_post_process``.

        Raises:
            ConfigError: see `agentrl.algo.reward_processing.shape_rewards`.
        """
        return shape_rewards(groups, self._algos[source])

    def advantages(self, source: str, inputs: AdvantageInput, teacher_gaps: RowValues | None = None) -> RowAdvantages:
        """Return the advantage of every trained token of a source's rollouts.

        Args:
            source: whose rollouts they are.
            inputs: rollouts with the rewards of `shape_rewards`, penalties and values.
            teacher_gaps: of every row, if there are teachers; see `agentrl.algo.kl`.

        Raises:
            ConfigError: the rewards do not fit the estimator, or it returned no finite number for a rollout.
            UngradedError: a teacher's log-probability of a trained token is not finite.
        """
        algo, estimator = self._algos[source], self._estimators[source]
        with _calling(estimator, "advantages"):
            estimates = estimator.advantages(inputs) if algo.needs_reward else None
        one_a_sequence = loss_class(algo.loss).one_advantage_per_sequence
        advantages: RowAdvantages = {}
        for rollout in inputs.groups.rollouts_N:
            by_row = {row.key: _row_advantages(estimates, rollout, row, estimator.name) for row in rollout.rows}
            if teacher_gaps is not None:
                reward_coef, coef = algo.distillation.reward_coef, algo.distillation.coef
                by_row = {key: reward_coef * row_T - coef * teacher_gaps[key] for key, row_T in by_row.items()}
            for sequence in sampled_sequences(rollout):
                advantages_S = sequence.gather(by_row)
                if not np.isfinite(advantages_S).all():  # the estimator's own were checked
                    raise UngradedError(
                        f"rollout {rollout.rollout_id!r} of task {rollout.prompt_id!r} may not be trained on: an advantage is "
                        "not finite, as the log-probability of a teacher is not (algo.distillation.teachers)"
                    )
                if one_a_sequence and len(advantages_S):
                    advantages_S[:] = advantages_S.mean() if np.ptp(advantages_S) else advantages_S
                advantages |= sequence.scatter(advantages_S)
        return advantages

    def returns(self, source: str, inputs: AdvantageInput) -> RowValues:
        """Return the critic's targets for every trained token of a source's rollouts; empty if it needs no critic."""
        estimator = self._estimators[source]
        if not estimator.needs_critic:
            return {}
        with _calling(estimator, "returns"):
            return estimator.returns(inputs)

    def update(self, inputs_by_source: Iterable[tuple[str, AdvantageInput]]) -> None:
        """Update the state after a training step with its rollouts."""
        for source, inputs in inputs_by_source:
            estimator = self._estimators[source]
            with _calling(estimator, "update"):
                estimator.update(inputs)

    def state(self) -> dict[str, Any]:
        """Return a copy of the estimators' states as JSON, by source, with their names; without those that have none."""
        states = {}
        for source, estimator in self._estimators.items():
            with _calling(estimator, "state"):
                if state := estimator.state():
                    json.dumps(state)
                    states[source] = {"name": estimator.name, "state": state}
        return states

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, after a round trip through JSON; an estimator of another name begins without a state."""
        for source, saved in state.items():
            estimator = self._estimators[source]
            if estimator.name == saved["name"]:
                with _calling(estimator, "load_state"):
                    estimator.load_state(saved["state"])

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all estimators' states."""
        metrics: dict[str, float] = {}
        for source, estimator in self._estimators.items():
            with _calling(estimator, "metrics"):
                metrics |= {name: float(number) for name, number in estimator.metrics(source).items()}
        return metrics


def _calling(estimator: AdvantageEstimator, method: str) -> AbstractContextManager[None]:
    return calling_algorithm(ADVANTAGE_KEY, estimator.name, method)


def _row_advantages(estimates: Advantages | None, rollout: Rollout, row: Row, name: str) -> NDArray[np.float32]:
    """Return the advantages of a row's tokens, with any numbers at those that are not trained; zeros without estimates."""
    if estimates is None:
        return np.zeros(row.mask.shape, np.float32)
    by_key: dict[object, object] = estimates  # type: ignore[assignment]
    advantage = by_key.get(row.key, by_key.get(row.key.rollout_id))
    if advantage is None:
        raise ConfigError(f"algo.advantage.name={name} returned no advantage for rollout {rollout.rollout_id!r}")
    advantages_T = np.broadcast_to(np.asarray(advantage, np.float32), row.mask.shape)
    if not np.isfinite(advantages_T[row.mask.astype(bool)]).all():
        raise ConfigError(
            f"algo.advantage.name={name}: an advantage of rollout {rollout.rollout_id!r}, with reward {rollout.reward:g}, is "
            "not finite"
        )
    return advantages_T


def mean_advantages(advantages: RowAdvantages) -> dict[str, float]:
    """Return the mean of each rollout's advantages that are not 0, by ``rollout_id``; 0 without any."""
    nonzero: dict[str, list[NDArray[np.float32]]] = {}
    for key, row_T in advantages.items():
        nonzero.setdefault(key.rollout_id, []).append(row_T[row_T != 0])
    tokens = {rollout_id: np.concatenate(rows).astype(np.float64) for rollout_id, rows in nonzero.items()}
    return {rollout_id: float(tokens_N.mean()) if len(tokens_N) else 0.0 for rollout_id, tokens_N in tokens.items()}
