"""Checks of supervised fine-tuning before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, MissingError
from agentrl.core.registry import make_env, make_tasks
from agentrl.models.resolve import resolve_model
from agentrl.runtime.checks import check_packages
from agentrl.runtime.training_summary import describe_training


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
    check_packages(config)


def describe_sft(config: Config, model: Path) -> list[str]:
    """Return lines on what is trained; see `describe_training`."""
    return describe_training(config, model)


def plan_sft(config: Config) -> list[str]:
    """Check everything that `check_sft` does, and list what this machine lacks; no model is fetched.

    Raises:
        UserError: with the value and the key to change.

    """
    missing: list[str] = []
    checks: tuple[Callable[[], object], ...] = (
        partial(check_sft, config),
        partial(resolve_model, config.model.path, fetch=False),
    )
    for check in checks:
        try:
            check()
        except MissingError as error:
            missing += str(error).splitlines()
    return missing
