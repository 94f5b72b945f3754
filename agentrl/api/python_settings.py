"""Settings from Python: nested mappings, dotted keys, and objects in place of references such as ``file.py:Class``."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from agentrl.api.settings import hardware_layer, preset_layers
from agentrl.config.layers import Layer
from agentrl.config.merging import Tree, merge
from agentrl.config.runners import runner_count
from agentrl.config.schema import Config
from agentrl.core.env import Env, EnvBase
from agentrl.core.errors import ConfigError
from agentrl.core.imports import PYTHON, is_loaded_file
from agentrl.core.multi_agent_env import MultiAgentEnv
from agentrl.core.tool import Tool

HERE = (
    "algo.reward_post_process",
    "batch.convert",
    "env.name",
    "eval.function",
    "reward.function",
    "rollout.generate",
    "rollout.buffer_filter",
    "rollout.filter_groups.filters",
    "tasks.name",
    "tasks.data_source.name",
)
"""Keys whose objects only the run's own process needs, unless it has runner processes."""
_SHORT = {"env": "name", "reward": "function"}
"""Sections that may be the value of one of their keys."""


@dataclass(slots=True)
class PythonSettings:
    """Settings as a layer of a configuration, and the objects in them that only this process has."""

    tree: Tree = field(default_factory=dict)
    objects: dict[str, object] = field(default_factory=dict)
    """By the key that holds them; see `agentrl.core.imports.python_objects`."""

    def add(self, settings: Mapping[str, object]) -> None:
        """Put settings on top.

        Raises:
            ConfigError: a key is no text, or an object cannot be used under its key.
        """
        self.tree = merge(self.tree, self._section("", settings))

    def _section(self, prefix: str, settings: Mapping[str, object]) -> Tree:
        tree: Tree = {}
        for key, value in settings.items():
            if not isinstance(key, str) or not all(names := key.split(".")):
                raise ConfigError(f"{prefix}{key!r} is no key of a configuration")
            converted = self._value(f"{prefix}{key}", value)
            for name in reversed(names):
                converted = {name: converted}
            tree = merge(tree, cast("Tree", converted))
        return tree

    def _value(self, key: str, value: object) -> object:
        section = key.split(".", 2)[2] if key.startswith("sources.") and key.count(".") > 1 else key
        if isinstance(value, Mapping):
            return self._section(f"{key}.", value)
        if section in _SHORT:
            return {_SHORT[section]: self._value(f"{key}.{_SHORT[section]}", value)}
        if isinstance(value, list | tuple):
            numbered = [f"{key}.{number}" if _is_object(item) else key for number, item in enumerate(value)]
            return [self._value(name, item) for name, item in zip(numbered, value, strict=True)]
        if isinstance(value, Path):
            return str(value)
        return self._reference(key, value) if _is_object(value) else value

    def _reference(self, key: str, target: object) -> str:
        """Return a reference to an object: by file or module where other processes can import it, else by its key.

        Raises:
            ConfigError: it cannot be used under its key.
        """
        if isinstance(target, Tool):
            raise ConfigError(
                f"{key}: {target.name} is a tool: environments name theirs (`tools` runs in the run's process, `tool_names` at a "
                f"server), and {key} has options"
            )
        if isinstance(target, EnvBase):
            raise ConfigError(
                f"{key}: {type(target).__name__}(…) is one environment, and each episode needs its own: give the class, or a "
                "function that returns a new one"
            )
        is_factory = key.endswith("env.name") and not inspect.isclass(target)
        if not is_factory and (reference := importable_reference(target)):
            return reference
        setting = key.rpartition(".")[0] if key.rpartition(".")[2].isdecimal() else key
        if not any(
            setting == name or (setting.startswith("sources.") and setting.endswith(f".{name}")) for name in HERE
        ):
            raise ConfigError(
                f"{key}: {_name(target)} is defined where other processes cannot import it, and this key is used in other "
                "processes. Write it to a file or a module, and import it from there, or name it as path/to/file.py:name"
            )
        self.objects[key] = _env_class(cast("Callable[..., object]", target), key) if is_factory else target
        return f"{PYTHON}:{key}"

    def check(self, config: Config) -> None:
        """Check that the run starts no processes that need the objects.

        Raises:
            ConfigError: it has runner processes.
        """
        if self.objects and (count := runner_count(config)):
            names = ", ".join(f"{key} ({_name(target)})" for key, target in self.objects.items())
            raise ConfigError(
                f"rollout.runners={config.rollout.runners}: episodes run in {count} other processes, which cannot import "
                f"{names}. Write it to a file or a module, or set rollout.runners=0"
            )


def _is_object(value: object) -> bool:
    return isinstance(value, Tool | EnvBase | functools.partial) or inspect.isroutine(value) or inspect.isclass(value)


def _name(target: object) -> str:
    return getattr(target, "__qualname__", None) or repr(target)


def importable_reference(target: object) -> str:
    """Return ``file.py:name`` or ``module:name`` of a class or function that other processes can import; empty if they cannot.

    What the script that this process runs defines is in its file. What a notebook's cell, a prompt or a function defines is
    nowhere.
    """
    module_name, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
    module = sys.modules.get(module_name or "")
    if module is None or not name or "<" in name:
        return ""
    attribute_value: object = module
    for attribute in name.split("."):
        attribute_value = getattr(attribute_value, attribute, None)
    if attribute_value is not target:
        return ""
    file = getattr(module, "__file__", None)
    if module_name == "__main__":
        spec = getattr(module, "__spec__", None)
        if spec is not None:
            return f"{spec.name}:{name}"
        return f"{Path(file).resolve()}:{name}" if file is not None and file.endswith(".py") else ""
    return f"{file}:{name}" if is_loaded_file(str(module_name)) else f"{module_name}:{name}"


def _env_class(factory: Callable[..., object], key: str) -> type:
    """Return a class that a factory of environments makes the instances of.

    Raises:
        ConfigError: it returns something else.
    """
    env = factory()
    if not isinstance(env, Env | MultiAgentEnv):
        raise ConfigError(
            f"{key}: {_name(factory)}() returned {env!r:.100}, and no agentrl.Env or agentrl.MultiAgentEnv"
        )
    cls = type(env)

    def make(made: type, **options: object) -> object:
        return factory(**options)

    # What `make` returns is no instance of this class, so that it is not initialised a second time.
    return type(
        cls.__name__,
        (cls,),
        {"__new__": make, "__signature__": inspect.signature(factory), "__module__": cls.__module__},
    )


ConfigLike = Config | Mapping[str, object] | str | Path | Sequence[str | Path] | None
"""A whole configuration; settings; or one or several files, or names of shipped presets and recipes."""
PYTHON_SETTINGS = "Python"
"""Origin of values from Python."""


def read_settings(config: ConfigLike, settings: Mapping[str, object]) -> tuple[list[str], PythonSettings]:
    """Return the files of a configuration, and the settings on top of them.

    Raises:
        ConfigError: ``config`` is something else, or see `PythonSettings.add`.
    """
    python, files = PythonSettings(), []
    if isinstance(config, Config):
        python.add(config.model_dump(mode="json"))
    elif isinstance(config, Mapping):
        python.add(config)
    elif isinstance(config, str | Path):
        files = [str(config)]
    elif isinstance(config, Sequence):
        files = [str(file) for file in config]
    elif config is not None:
        raise ConfigError(f"config={config!r:.100} is no configuration, mapping or file")
    python.add(settings)
    return files, python


def new_layers(config: ConfigLike, files: Sequence[str], python: PythonSettings) -> list[Layer]:
    """Return the layers of a configuration that is not that of a run."""
    settings = Layer(PYTHON_SETTINGS, python.tree)
    return [hardware_layer(), settings] if isinstance(config, Config) else preset_layers(files, settings)
