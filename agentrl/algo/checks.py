"""Checks of a configuration against what its estimators and policy losses declare."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from agentrl.algo.advantages import ESTIMATORS
from agentrl.algo.registry import estimator_class, make_estimator, make_policy_loss, needs_critic
from agentrl.config.algo import AlgoConfig, CriticConfig
from agentrl.config.checks import run_and_source_faults
from agentrl.config.schema import Config
from agentrl.config.train import AsyncConfig
from agentrl.core.errors import UserError


def algorithm_faults(config: Config) -> list[str]:
    """Return what is wrong with names and options of estimator and loss, and what the run lacks of what they declare.

    Each is one line with the keys and a setting that fits.
    """
    faults = run_and_source_faults(config, lambda source: _names_and_options(source.algo))
    if faults:  # the other rules read the declarations of classes that exist
        return faults
    faults = run_and_source_faults(config, lambda source: _rewards(source.algo))
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


def _rewards(algo: AlgoConfig) -> Iterator[str]:
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


def _critic(algo: AlgoConfig, steps: int) -> Iterator[str]:
    critic = algo.critic
    if not needs_critic(algo):
        defaults = CriticConfig().model_dump()
        for key, value in critic.model_dump().items():
            if value != defaults[key]:
                yield (
                    f"algo.critic.{key} is set, and algo.advantage.name={algo.advantage.name} has no critic; set "
                    f"algo.advantage.name={_with_critic()}, or leave out algo.critic.{key}"
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
    estimators = _estimators(algo, lambda source: not _streams(source))
    if asynchronous.streaming and estimators:
        yield f"async.streaming=true with {estimators}: it needs all groups of a step; leave it out, or async.streaming"


def _streams(algo: AlgoConfig) -> bool:
    estimator = estimator_class(algo.advantage)
    return estimator.streams and not estimator.needs_critic  # values are computed for a whole step


def _estimators(config: AlgoConfig, applies: Callable[[AlgoConfig], bool]) -> str:
    """Return the estimators of the sources to which a rule applies, as a setting; empty without any."""
    names = {algo.advantage.name for algo in config.by_source.values() if applies(algo)}
    return f"algo.advantage.name={', '.join(sorted(names))}" if names else ""


def _with_critic() -> str:
    return " or ".join(name for name, estimator in ESTIMATORS.items() if estimator.needs_critic)
