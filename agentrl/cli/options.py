"""Options shared by subcommands, and the configuration that they resolve to."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from agentrl.config.checks import Rule
from agentrl.config.layers import Layer, load_layers
from agentrl.config.load import default_config, find_config, is_recipe, parse_override, read_yaml, shipped_name
from agentrl.config.merging import Tree, merge
from agentrl.config.schema import Config
from agentrl.core.errors import UserError
from agentrl.core.registry import env_class

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


def has_gpu() -> bool:
    """Return whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


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
    return load_layers([_hardware(), *_file_layers(arguments.config), Layer(COMMAND_LINE, _overrides(arguments))])


def load_environment(layers: Sequence[Layer], rules: Sequence[Rule] = ()) -> Config:
    """Return the configuration of all layers, whose algorithm and environment exist.

    Raises:
        ConfigError: as in `load_layers`, with lines of `algorithm_faults`, of environments that do not exist, and of ``rules``.
    """
    from agentrl.algo.registry import algorithm_faults  # imports torch

    return load_layers(layers, [algorithm_faults, _environment_faults, *rules])


def _environment_faults(config: Config) -> Iterator[str]:
    for name, source_config in config.by_source().items():
        try:
            env_class(source_config.env.name, f"sources.{name}.env.name" if name else "env.name")
        except UserError as error:
            yield str(error)


def config_layers(arguments: argparse.Namespace) -> list[Layer]:
    """Return preset, ``--config`` files in their order, and settings of the command line, from bottom to top.

    The preset is that of the environment for this hardware. There is none if files are given without an environment, and
    none if one of the files is a preset itself. Recipes are no such files: they change nothing of this.

    Raises:
        ConfigError, UnknownNameError: a file or the environment does not exist, or a setting does not parse.
    """
    settings = _overrides(arguments)
    files = _file_layers(arguments.config)
    layers = [_hardware()]
    env_name = settings.get("env", {}).get("name") if isinstance(settings.get("env"), dict) else None
    preset_candidates = [file for name in arguments.config if not is_recipe(file := find_config(name))]
    if env_name is not None or not preset_candidates:
        env = str(env_name or "search_r1")
        env_class(env)
        preset = default_config(env, gpu=has_gpu())
        if preset is not None and not any(map(shipped_name, preset_candidates)):
            layers.append(Layer(_origin(preset), read_yaml(preset)))
    return [*layers, *files, Layer(COMMAND_LINE, settings)]


def command_line_layers(arguments: argparse.Namespace) -> list[Layer]:
    """Return only what the command line gives: ``--config`` files and settings, without a preset; for a resumed run.

    Raises:
        ConfigError: a file does not exist, or a setting does not parse.
    """
    return [*_file_layers(arguments.config), Layer(COMMAND_LINE, _overrides(arguments))]


def _file_layers(names: Sequence[str]) -> list[Layer]:
    files = [find_config(name) for name in names]
    return [
        Layer(_origin(file) or f"--config {name}", read_yaml(file)) for name, file in zip(names, files, strict=True)
    ]


def _origin(file: Path) -> str:
    """Return the origin of values from a shipped configuration; empty for another file."""
    name = shipped_name(file)
    return f"{'recipe' if is_recipe(file) else 'preset'} {name}" if name else ""


def _overrides(arguments: argparse.Namespace) -> Tree:
    env = getattr(arguments, "env", None)
    tree: Tree = {"env": {"name": env}} if env else {}
    for override in arguments.overrides:
        tree = merge(tree, parse_override(override))
    return tree


def _hardware() -> Layer:
    """Defaults for this machine: with a GPU the engine is SGLang unless a file sets another."""
    return Layer("default of this machine", {"sampler": {"backend": "sglang" if has_gpu() else "embedded"}})
