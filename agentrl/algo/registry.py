"""From the names of ``algo.advantage`` and ``algo.loss`` to classes and instances, and what a run's algorithms need."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TypeVar

from agentrl.algo.advantages import ESTIMATORS
from agentrl.algo.base import AdvantageEstimator, Algorithm, PolicyLoss
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.config.algo import AdvantageConfig, AlgoConfig, LossConfig
from agentrl.config.validation import parse_section
from agentrl.core.errors import ConfigError, unknown_name
from agentrl.core.imports import is_reference, load_object

A = TypeVar("A", bound=Algorithm)
ADVANTAGE_KEY, LOSS_KEY = "algo.advantage", "algo.loss"


def estimator_class(config: AdvantageConfig) -> type[AdvantageEstimator]:
    """Return the class of an estimator, which declares what it needs.

    Raises:
        ConfigError, UnknownNameError: there is no such name, or the import path names no subclass of `AdvantageEstimator`.
    """
    return _find_class(ADVANTAGE_KEY, config.name, ESTIMATORS, AdvantageEstimator)  # type: ignore[type-abstract]  # for issubclass


def loss_class(config: LossConfig) -> type[PolicyLoss]:
    """Return the class of a policy loss, which declares what it needs; errors as of `estimator_class`."""
    return _find_class(LOSS_KEY, config.name, POLICY_LOSSES, PolicyLoss)  # type: ignore[type-abstract]  # for issubclass


def make_estimator(config: AdvantageConfig) -> AdvantageEstimator:
    """Return a new estimator.

    Raises:
        ConfigError, UnknownNameError: as of `estimator_class`, or an option is unknown or does not fit.
    """
    return _make(ADVANTAGE_KEY, estimator_class(config), config)


def make_policy_loss(config: LossConfig) -> PolicyLoss:
    """Return a policy loss; errors as of `make_estimator`."""
    return _make(LOSS_KEY, loss_class(config), config)


def needs_critic(config: AlgoConfig) -> bool:
    """Return whether an estimator needs a critic, of any source."""
    return any(estimator_class(algo.advantage).needs_critic for algo in config.by_source.values())


def compares_groups(config: AlgoConfig) -> bool:
    """Return whether the estimators of all sources compare the rollouts of a task with each other."""
    return all(estimator_class(algo.advantage).compares_group for algo in config.by_source.values())


def needs_whole_sequences(config: AlgoConfig) -> bool:
    """Return whether a policy loss needs the ratio of whole sequences, of any source."""
    return any(loss_class(algo.loss).needs_whole_sequences for algo in config.by_source.values())


def describe_algorithm(config: AlgoConfig) -> str:
    """Return estimator, teachers and loss in a few words, of every source."""
    if list(config.by_source) != [""]:
        return "; ".join(f"{source}: {describe_algorithm(algo)}" for source, algo in config.by_source.items())
    teachers = config.distillation.teachers
    estimator = [f"{config.advantage.name} advantages"] if config.distillation.reward_coef or not teachers else []
    distillation = [f"distillation from {', '.join(teachers)}"] if teachers else []
    critic = ["a critic"] if needs_critic(config) else []
    return ", ".join([*estimator, *distillation, f"{config.loss.name} loss", *critic])


def _find_class(key: str, name: str, table: Mapping[str, type[A]], base: type[A]) -> type[A]:
    if not is_reference(name):
        if name not in table:
            raise unknown_name(key.rpartition(".")[2], name, table, f"{key}.name")
        return table[name]
    algorithm = load_object(name, f"{key}.name")
    if not (isinstance(algorithm, type) and issubclass(algorithm, base)):
        raise ConfigError(
            f"{key}.name={name} is {algorithm!r:.80}, and no class derived from agentrl.algo.base.{base.__name__}"
        )
    if missing_methods := sorted(algorithm.__abstractmethods__) if inspect.isabstract(algorithm) else []:
        raise ConfigError(f"{key}.name={name} does not define {', '.join(missing_methods)}")
    return algorithm


def _make(key: str, algorithm: type[A], config: AdvantageConfig | LossConfig) -> A:
    options = parse_section(algorithm.Options, config.options, prefix=f"{key}.options.")
    return algorithm(options, config.name)
