"""The layers of a configuration: preset of the environment, files in their order, settings on top."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from agentrl.config.checks import Rule
from agentrl.config.layers import Layer, load_layers
from agentrl.config.load import default_config, find_config, is_recipe, read_yaml, shipped_name
from agentrl.config.schema import Config
from agentrl.core.errors import UserError
from agentrl.core.imports import is_reference
from agentrl.core.registry import env_class


def has_gpu() -> bool:
    """Return whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def hardware_layer() -> Layer:
    """Return the defaults for this machine: with a GPU the engine is SGLang unless a file sets another."""
    return Layer("default of this machine", {"sampler": {"backend": "sglang" if has_gpu() else "embedded"}})


def preset_layers(files: Sequence[str], settings: Layer) -> list[Layer]:
    """Return preset, files in their order, and settings, from bottom to top.

    The preset is that of the environment for this hardware. There is none if files are given without an environment, and
    none if one of the files is a preset itself. Recipes are no such files: they change nothing of this.

    Args:
        files: paths, or names of shipped presets and recipes.
        settings: the top layer.

    Raises:
        ConfigError, UnknownNameError: a file or the environment does not exist.
    """
    layers = [hardware_layer()]
    section = settings.tree.get("env")
    env_name = section.get("name") if isinstance(section, dict) else None
    preset_candidates = [file for name in files if not is_recipe(file := find_config(name))]
    if env_name is not None or not preset_candidates:
        env = str(env_name or "search_r1")
        env_class(env)
        preset = None if is_reference(env) else default_config(env, gpu=has_gpu())
        if preset is not None and not any(map(shipped_name, preset_candidates)):
            layers.append(Layer(_origin(preset), read_yaml(preset)))
    return [*layers, *file_layers(files), settings]


def file_layers(names: Sequence[str]) -> list[Layer]:
    """Return the layers of files, in their order.

    Raises:
        ConfigError: a file does not exist, or is no configuration.
    """
    files = [find_config(name) for name in names]
    return [
        Layer(_origin(file) or f"--config {name}", read_yaml(file)) for name, file in zip(names, files, strict=True)
    ]


def _origin(file: Path) -> str:
    """Return the origin of values from a shipped configuration; empty for another file."""
    name = shipped_name(file)
    return f"{'recipe' if is_recipe(file) else 'preset'} {name}" if name else ""


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
