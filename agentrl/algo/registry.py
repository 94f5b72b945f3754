"""From the names of ``algo.advantage`` and ``algo.loss`` to classes and instances, what algorithms need, and their checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from agentrl.algo.advantages import ESTIMATORS
from agentrl.algo.base import AdvantageEstimator, Algorithm, PolicyLoss
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.config.algo import AdvantageConfig, AlgoConfig, CriticConfig, LossConfig
from agentrl.config.checks import run_and_source_faults
from agentrl.config.layers import leaf_texts
from agentrl.config.schema import Config
from agentrl.config.train import AsyncConfig
from agentrl.config.validation import parse_section
from agentrl.core.errors import ConfigError, UserError, unknown_name
from agentrl.core.imports import is_reference, load_object
from agentrl.core.user_code import calling

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
    with calling_algorithm(key, config.name, "its constructor"):
        return algorithm(options, config.name)


def calling_algorithm(key: str, name: str, method: str) -> AbstractContextManager[None]:
    """Raise a `ConfigError` with the author's line in place of errors of a user's estimator or loss."""
    return calling(f"{key}.name={name}: {method}") if is_reference(name) else nullcontext()


def algorithm_faults(config: Config) -> list[str]:
    """Return what is wrong with names and options of estimator and loss, and what the run lacks of what they declare.

    Each is one line with the keys and a setting that fits.
    """
    faults = run_and_source_faults(config, lambda source: _names_and_options(source.algo))
    if faults:  # the other rules read the declarations of classes that exist
        return faults
    faults = run_and_source_faults(config, _rewards)
    algo, asynchronous = config.algo, config.asynchronous
    return [
        *faults,
        *_critic(algo, config.train.steps),
        *_mask_older_than(algo, asynchronous),
        *_streaming(algo, asynchronous),
    ]


def _names_and_options(algo: AlgoConfig) -> Iterator[str]:
    for make in (lambda: make_estimator(algo.advantage), lambda: make_policy_loss(algo.loss)):
        try:
            make()
        except UserError as error:
            yield str(error)


def _rewards(config: Config) -> Iterator[str]:
    algo = config.algo
    if estimator_class(algo.advantage).needs_several_rewards and not config.reward.functions:
        yield (
            f"algo.advantage.name={algo.advantage.name} normalises several rewards apart, and there are none: set "
            "reward.functions, or algo.advantage.name=grpo"
        )
    penalties = {
        "algo.overlong.max_tokens": algo.overlong.max_tokens is not None,
        "algo.kl_in=reward": algo.needs_reference and algo.kl_in == "reward",
    }
    if estimator_class(algo.advantage).needs_nonnegative_rewards and any(penalties.values()):
        yield (
            f"algo.advantage.name={algo.advantage.name} with {' and '.join(key for key, used in penalties.items() if used)}: "
            "it needs rewards of at least 0, which penalties can make negative; leave them out, or choose "
            "algo.advantage.name=grpo"
        )


def _critic(algo: AlgoConfig, steps: int | None) -> Iterator[str]:
    critic = algo.critic
    if not needs_critic(algo):
        texts, defaults = (leaf_texts({"algo": {"critic": config.model_dump()}}) for config in (critic, CriticConfig()))
        with_critic = " or ".join(name for name, estimator in ESTIMATORS.items() if estimator.needs_critic)
        for key, text in texts.items():
            if text != (default := defaults.get(key, "null")):
                yield (
                    f"{key} is set, and algo.advantage.name={algo.advantage.name} has no critic; set "
                    f"algo.advantage.name={with_critic}, or {key}={default}"
                )
        return
    if steps and critic.warmup_steps >= steps:
        yield (
            f"algo.critic.warmup_steps={critic.warmup_steps} with train.steps={steps}: the policy is never trained; lower "
            "algo.critic.warmup_steps"
        )
    if not algo.needs_reward:
        yield (
            f"algo.distillation.reward_coef=0 with {_estimators(algo, needs_critic)}: no reward is left for the critic; set "
            "another estimator"
        )


def _mask_older_than(algo: AlgoConfig, asynchronous: AsyncConfig) -> Iterator[str]:
    limit = asynchronous.mask_older_than
    if limit is not None and needs_critic(algo):
        yield (
            f"async.mask_older_than={limit} with {_estimators(algo, needs_critic)}: returns need the values of all tokens; "
            "leave out async.mask_older_than"
        )


def _streaming(algo: AlgoConfig, asynchronous: AsyncConfig) -> Iterator[str]:
    """Whether the gradient of a group can be computed before all groups of its step are there."""

    def needs_step(source: AlgoConfig) -> bool:
        estimator = estimator_class(source.advantage)
        return not estimator.streams or estimator.needs_critic  # values are computed for a whole step

    if asynchronous.streaming and (estimators := _estimators(algo, needs_step)):
        yield f"async.streaming=true with {estimators}: it needs all groups of a step; leave it out, or async.streaming"


def _estimators(config: AlgoConfig, applies: Callable[[AlgoConfig], bool]) -> str:
    """Return the estimators of the sources to which a rule applies, as a setting; empty without any."""
    names = {algo.advantage.name for algo in config.by_source.values() if applies(algo)}
    return f"algo.advantage.name={', '.join(sorted(names))}" if names else ""
