"""A `Config` from files, those that are shipped included, and the command line: defaults, file, overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agentrl.config.checks import Rule, check
from agentrl.config.merging import Tree, merge, overlay
from agentrl.config.schema import Config
from agentrl.config.secret_values import REDACTED, redacted_keys
from agentrl.config.validation import parse_section
from agentrl.config.yaml_text import dump_yaml, parse_yaml
from agentrl.core.errors import ConfigError
from agentrl.core.reading import flatten_message


def load_config(file: Path | None, overrides: Sequence[str] = (), base: Tree | None = None) -> Config:
    """Return the configuration of ``file`` with ``key=value`` overrides on top.

    ``base`` is below both, for values that the command line implies, such as ``--env``.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value does not fit.
    """
    settings: Tree = {}
    for override in overrides:
        settings = merge(settings, parse_override(override))
    return validate(overlay(overlay(base or {}, read_yaml(file) if file else {}), settings))


def read_yaml(file: Path) -> Tree:
    """Return the mapping in a YAML file.

    Raises:
        ConfigError: there is no such file, it does not parse, or holds no mapping.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"configuration {file}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration {file}: {flatten_message(error)}") from None
    content = parse_yaml(text, f"configuration {file}")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"configuration {file}: a configuration is a mapping, this is a {type(content).__name__}")
    return _expand_short_forms(content)


def parse_override(text: str) -> Tree:
    """Return ``a.b=value`` as ``{"a": {"b": value}}``; the value is read as YAML.

    Raises:
        ConfigError: there is no ``=``, or the value is no YAML.
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r} is not a setting; write key=value, such as train.steps=20")
    names = key.split(".")
    if not all(names):
        raise ConfigError(f"{text!r} is not a setting: {key!r} has a name that is empty")
    parsed = parse_yaml(value, key)
    for name in reversed(names):
        parsed = {name: parsed}
    assert isinstance(parsed, dict)
    return _expand_short_forms(parsed)


def _expand_short_forms(tree: Tree) -> Tree:
    """Return the tree with ``reward: F`` as ``reward: {function: F}``, and ``env: {tools: T}`` as ``env: {options: {tools: T}}``.

    So they merge with other keys of these sections.
    """
    if "reward" in tree and isinstance(tree["reward"], str | None):
        tree = {**tree, "reward": {"function": tree["reward"]}}
    env = tree.get("env")
    if isinstance(env, dict) and "tools" in env and isinstance(options := env.get("options") or {}, dict):
        other_settings = {key: value for key, value in env.items() if key != "tools"}
        tree = {**tree, "env": {**other_settings, "options": {**options, "tools": env["tools"]}}}
    if isinstance(sources := tree.get("sources"), dict):
        sources_tree = {
            name: _expand_short_forms(source) if isinstance(source, dict) else source
            for name, source in sources.items()
        }
        tree = {**tree, "sources": sources_tree}
    return tree


def validate(tree: Mapping[str, Any], rules: Sequence[Rule] = ()) -> Config:
    """Return the tree as a `Config` that passes `agentrl.config.checks.check` with further rules.

    Raises:
        ConfigError: one line for every fault, each with its key.
    """
    keys = list(redacted_keys(tree))
    if keys:
        raise ConfigError(
            f"{keys[0]}={REDACTED}: this configuration was written without its secrets; add --config RUN/secrets.yaml "
            f"of the run that wrote it, or set {', '.join(keys)}"
        )
    config = parse_section(Config, tree)
    check(config, rules)
    return config


def dump(config: Config) -> str:
    """Return the configuration as YAML that `load_config` reads back, with its secrets."""
    return dump_yaml(config.model_dump(mode="json"))


RECIPES = ("algo/", "models/")
"""What the names of shipped recipes begin with."""


@cache
def shipped_folder() -> Path:
    """Return the folder that holds the shipped YAML files."""
    spec = find_spec("agentrl_configs")
    assert spec is not None, "agentrl_configs is part of the distribution"
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def find_config(name: str) -> Path:
    """Return the file of ``--config``: a path, or a shipped one by name such as ``search_r1/cpu``.

    Raises:
        ConfigError: neither exists; the message lists what is shipped.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    folder = shipped_folder()
    for candidate in (folder / name, folder / f"{name}.yaml"):
        if candidate.is_file():
            return candidate
    shipped = sorted(str(file.relative_to(folder).with_suffix("")) for file in folder.rglob("*.yaml"))
    raise ConfigError(
        f"--config {name}: no such file, and no shipped configuration of that name; shipped: {', '.join(shipped)}"
    )


def training_configs(env: str) -> list[str]:
    """Return the names of the shipped configurations that train on an environment."""
    folder = shipped_folder()
    files = sorted(file for file in (folder / env).glob("*.yaml") if not file.name.startswith("sft"))
    return [file.relative_to(folder).with_suffix("").as_posix() for file in files]


def default_config(env: str, *, gpu: bool) -> Path | None:
    """Return the shipped configuration for an environment on this hardware, or None; without one for a GPU, that for a CPU."""
    names = ("gpu.yaml", "cpu.yaml") if gpu else ("cpu.yaml",)
    return next((path for name in names if (path := shipped_folder() / env / name).is_file()), None)


def shipped_name(file: Path) -> str | None:
    """Return the name of a shipped configuration such as ``search_r1/cpu``, or None for another file."""
    folder, path = shipped_folder().resolve(), file.resolve()
    return str(path.relative_to(folder).with_suffix("")) if path.is_relative_to(folder) else None


def is_recipe(file: Path) -> bool:
    """Return whether a file is a shipped recipe, of an algorithm or a model, which is put on top of any preset."""
    return (shipped_name(file) or "").startswith(RECIPES)
