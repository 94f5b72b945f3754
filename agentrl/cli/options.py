"""Options shared by subcommands, and the configuration that they resolve to."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from agentrl.config.load import Tree, load_config
from agentrl.config.schema import Config
from agentrl.config.shipped import default_config, find_config
from agentrl.core.registry import env_class


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--env``, ``--config`` and ``key=value``."""
    parser.add_argument("--env", help="a registered environment, or path/to/file.py:Class")
    add_plain_config_arguments(parser)


def add_plain_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and ``key=value``, for commands without an environment."""
    parser.add_argument("--config", help="a YAML file, or a shipped configuration such as search_r1/cpu")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings over those of the file")


def has_gpu() -> bool:
    """Return whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def resolve_config(arguments: argparse.Namespace, extra: Tree | None = None) -> Config:
    """Return the configuration of the command line.

    Without ``--config``, the shipped configuration for the environment and this hardware is used, if there is one.

    Raises:
        ConfigError, UnknownNameError: as in `load_config`; the environment is looked up too.

    """
    file: Path | None
    if arguments.config:
        file = find_config(arguments.config)
    else:
        env_class(arguments.env or "search_r1")
        file = default_config(arguments.env or "search_r1", gpu=has_gpu())
    overrides = list(arguments.overrides)
    if arguments.env:
        overrides.insert(0, f"env.name={arguments.env}")
    config = load_config(file, overrides, base=_hardware_base())
    if extra:
        config = load_config(None, [], base=_merged(config, extra))
    env_class(config.env.name, "env.name")
    return config


def resolve_plain_config(arguments: argparse.Namespace) -> Config:
    """Return the configuration of the command line of `add_plain_config_arguments`; without a default one.

    Raises:
        ConfigError: as in `load_config`.

    """
    file = find_config(arguments.config) if arguments.config else None
    return load_config(file, arguments.overrides, base=_hardware_base())


def _hardware_base() -> Tree:
    """Defaults below a configuration file: with a GPU the engine is SGLang unless the file sets another."""
    return {"sampler": {"backend": "sglang" if has_gpu() else "embedded"}}


def _merged(config: Config, extra: Tree) -> dict[str, Any]:
    from agentrl.config.load import merge

    return merge(config.model_dump(mode="json"), extra)
