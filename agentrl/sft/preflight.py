"""Checks of supervised fine-tuning before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, MissingError
from agentrl.core.registry import make_env, make_tasks
from agentrl.learner.registry import make_backend
from agentrl.models.export import check_free
from agentrl.models.learning_rates import with_rates
from agentrl.models.resolve import resolve_model
from agentrl.planner.training_summary import describe_training, with_recompute
from agentrl.runtime.checks import check_packages


def check_sft(config: Config) -> None:
    """Check the source of the demonstrations, and the packages of the run's outputs.

    Raises:
        UserError: with the value and the key to change.
    """
    if config.sources:
        raise ConfigError(
            f"sources={', '.join(config.sources)}: demonstrations are of one environment; leave out sources, and set env and "
            "tasks"
        )
    if config.tasks.name is None:
        raise ConfigError("tasks.name is not set: demonstrations come from a taskset's demonstrator()")
    make_tasks(config.tasks.name, config.tasks.options)
    make_env(config.env.name, config.env.options)
    check_packages(config.learner, config.obs)
    if config.sft.out is not None:
        check_free(config.sft.out, "sft.out=")
    make_backend(config.learner).check(config.algo, [])


def prepare_sft(config: Config) -> tuple[Config, Path, list[str]]:
    """Check a run, and return its configuration with numbers in place of ``auto``, its model, and lines on the training.

    Raises:
        UserError: with the value and the key to change.
    """
    check_sft(config)
    model = resolve_model(config.model.path)
    make_backend(config.learner).check(config.algo, [model])
    lines = describe_training(config, model, None, "sft")
    resolved, recompute_lines = with_recompute(with_rates(config, model, None, "sft"), model)
    return resolved, model, lines + recompute_lines


def plan_sft(config: Config) -> list[str]:
    """Check everything that `check_sft` does, and list what this machine lacks; no model is fetched.

    Raises:
        UserError: with the value and the key to change.
    """
    missing_packages: list[str] = []
    checks: tuple[Callable[[], object], ...] = (
        partial(check_sft, config),
        partial(resolve_model, config.model.path, fetch=False),
    )
    for check in checks:
        try:
            check()
        except MissingError as error:
            missing_packages += str(error).splitlines()
    return missing_packages
