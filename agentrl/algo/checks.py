"""Checks of a configuration against what its estimators and policy losses declare."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from agentrl.algo.advantages import ESTIMATORS
from agentrl.algo.registry import estimator_class, make_estimator, make_policy_loss, needs_critic
from agentrl.config.algo import CriticConfig
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, UserError


def check_algorithm(config: Config) -> None:
    """Check names and options of estimator and loss, and whether the run has what they declare.

    Raises:
        ConfigError: one line for each violated rule, with the keys and a setting that fits.
    """
    faults = _of_run_and_sources(config, _names_and_options)
    if not faults:  # the other rules read the declarations of classes that exist
        faults = _of_run_and_sources(config, _rewards)
        faults += [fault for rule in (_critic, _mask_older_than, _streaming) for fault in rule(config)]
    if faults:
        raise ConfigError("\n".join(faults))


def _of_run_and_sources(config: Config, rule: Callable[[Config], Iterator[str]]) -> list[str]:
    """Return the faults of the run, and those of sources that the run does not have."""
    faults = list(rule(config))
    for name, source in config.by_source().items() if config.sources else ():
        faults += [f"sources.{name}: {fault}" for fault in rule(source) if fault not in faults]
    return faults


def _names_and_options(config: Config) -> Iterator[str]:
    for make in (lambda: make_estimator(config.algo.advantage), lambda: make_policy_loss(config.algo.loss)):
        try:
            make()
        except UserError as error:
            yield str(error)


def _rewards(config: Config) -> Iterator[str]:
    algo = config.algo
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


def _critic(config: Config) -> Iterator[str]:
    critic, steps = config.algo.critic, config.train.steps
    if not needs_critic(config.algo):
        defaults = CriticConfig().model_dump()
        for key, value in critic.model_dump().items():
            if value != defaults[key]:
                yield (
                    f"algo.critic.{key} is set, and algo.advantage.name={config.algo.advantage.name} has no critic; set "
                    f"algo.advantage.name={_with_critic()}, or leave out algo.critic.{key}"
                )
        return
    if steps and critic.warmup_steps >= steps:
        yield (
            f"algo.critic.warmup_steps={critic.warmup_steps} with train.steps={steps}: the policy is never trained; lower "
            "algo.critic.warmup_steps"
        )
    if not config.algo.needs_reward:
        yield (
            f"algo.distillation.reward_coef=0 with {_estimators(config, lambda source: needs_critic(source.algo))}: no reward "
            "is left for the critic; set another estimator"
        )


def _mask_older_than(config: Config) -> Iterator[str]:
    limit = config.asynchronous.mask_older_than
    if limit is not None and needs_critic(config.algo):
        yield (
            f"async.mask_older_than={limit} with {_estimators(config, lambda source: needs_critic(source.algo))}: returns need "
            "the values of all tokens; leave out async.mask_older_than"
        )


def _streaming(config: Config) -> Iterator[str]:
    """Whether the gradient of a group can be computed before all groups of its step are there."""
    estimators = _estimators(config, lambda source: not _streams(source))
    if config.asynchronous.streaming and estimators:
        yield f"async.streaming=true with {estimators}: it needs all groups of a step; leave it out, or async.streaming"


def _streams(config: Config) -> bool:
    estimator = estimator_class(config.algo.advantage)
    return estimator.streams and not estimator.needs_critic  # values are computed for a whole step


def _estimators(config: Config, applies: Callable[[Config], bool]) -> str:
    """Return the estimators of the sources to which a rule applies, as a setting; empty without any."""
    names = {source.algo.advantage.name for source in config.by_source().values() if applies(source)}
    return f"algo.advantage.name={', '.join(sorted(names))}" if names else ""


def _with_critic() -> str:
    return " or ".join(name for name, estimator in ESTIMATORS.items() if estimator.needs_critic)
