"""Options shared by subcommands, and the configuration that they resolve to."""

from __future__ import annotations

import argparse

from agentrl.api.settings import file_layers, hardware_layer, load_environment, preset_layers
from agentrl.config.layers import Layer, load_layers
from agentrl.config.load import parse_override
from agentrl.config.merging import Tree, merge
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError

COMMAND_LINE = "command line"
"""Origin of values from ``key=value`` and ``--env``."""


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--env``, ``--config`` and ``key=value``."""
    parser.add_argument("--env", help="a registered environment, or path/to/file.py:Class")
    add_plain_config_arguments(parser)


def add_plain_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and ``key=value``, for commands without an environment."""
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        help="a YAML file, a preset such as search_r1/cpu, or a recipe such as algo/gspo; may be repeated, the last one "
        "overrides",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings over those of the files")


def resolve_config(arguments: argparse.Namespace, extra: Tree | None = None) -> Config:
    """Return the configuration of the command line, with ``extra`` on top.

    Raises:
        ConfigError, UnknownNameError: as in `config_layers` and `load_layers`; the environment is looked up too.
    """
    layers = config_layers(arguments)
    if extra:
        layers.append(Layer(COMMAND_LINE, extra))
    return load_environment(layers)


def resolve_plain_config(arguments: argparse.Namespace) -> Config:
    """Return the configuration of the command line of `add_plain_config_arguments`; without a preset.

    Raises:
        ConfigError: as in `load_layers`.
    """
    return load_layers([hardware_layer(), *command_line_layers(arguments)])


def config_layers(arguments: argparse.Namespace) -> list[Layer]:
    """Return preset, ``--config`` files and settings of the command line; see `preset_layers`.

    Raises:
        ConfigError, UnknownNameError: a file or the environment does not exist, or a setting does not parse.
    """
    return preset_layers(arguments.config, Layer(COMMAND_LINE, _overrides(arguments)))


def command_line_layers(arguments: argparse.Namespace) -> list[Layer]:
    """Return only what the command line gives: ``--config`` files and settings, without a preset; for a resumed run.

    Raises:
        ConfigError: a file does not exist, or a setting does not parse.
    """
    return [*file_layers(arguments.config), Layer(COMMAND_LINE, _overrides(arguments))]


def check_one_model(arguments: argparse.Namespace, option: str) -> None:
    """Check that ``model.path`` is not set next to ``option``, which gives the model.

    Raises:
        ConfigError: it is.
    """
    for override in arguments.overrides:
        if override.partition("=")[0].strip() == "model.path":
            raise ConfigError(f"{option} with {override}: two models; leave out one")


def _overrides(arguments: argparse.Namespace) -> Tree:
    env = getattr(arguments, "env", None)
    tree: Tree = {"env": {"name": env}} if env else {}
    for override in arguments.overrides:
        tree = merge(tree, parse_override(override))
    return tree
