"""From files and command line to a `Config`: layers, overrides, errors that name the key."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError

Tree = dict[str, Any]


def load_config(file: Path | None, overrides: Sequence[str] = (), base: Tree | None = None) -> Config:
    """Return the configuration of ``file`` with ``key=value`` overrides on top.

    ``base`` lies under both, for values that the command line implies, such as ``--env``.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value does not fit.

    """
    tree = merge(base or {}, read_yaml(file) if file else {})
    for override in overrides:
        tree = merge(tree, parse_override(override))
    return validate(tree)


def read_yaml(file: Path) -> Tree:
    """Return the mapping in a YAML file.

    Raises:
        ConfigError: there is no such file, it does not parse, or holds no mapping.

    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror or error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {file}: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {file}: a configuration is a mapping, this is a {type(content).__name__}")
    return _spelled_out(content)


def parse_override(text: str) -> Tree:
    """Return ``a.b=value`` as ``{"a": {"b": value}}``; the value is read as YAML.

    Raises:
        ConfigError: there is no ``=``, or the value is no YAML.

    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r} is no setting; write key=value, such as train.steps=20")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}: the value {value!r} does not parse: {error}") from None
    if isinstance(parsed, str):
        parsed = _number(parsed)
    for part in reversed(key.split(".")):
        parsed = {part: parsed}
    assert isinstance(parsed, dict)
    return _spelled_out(parsed)


def _spelled_out(tree: Tree) -> Tree:
    """Return the tree with the short ``reward: F`` as ``reward: {function: F}``, so that it merges with other keys of it."""
    if "reward" not in tree or not isinstance(tree["reward"], str | None):
        return tree
    return {**tree, "reward": {"function": tree["reward"]}}


def _number(text: str) -> str | float:
    """YAML 1.1 reads ``1e-3`` as a string; people mean the number."""
    try:
        return float(text) if "e" in text.lower() and text[0] in "+-.0123456789" else text
    except ValueError:
        return text


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tree:
    """Return ``above`` laid over ``below``, mapping by mapping."""
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def validate(tree: Mapping[str, Any]) -> Config:
    """Return the tree as a `Config`.

    Raises:
        ConfigError: one line for every fault, each with its key.

    """
    try:
        return Config.model_validate(dict(tree))
    except ValidationError as error:
        raise ConfigError("\n".join(_describe(fault) for fault in error.errors())) from None


def _describe(fault: Mapping[str, Any]) -> str:
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        close = nearest_key(key)
        return f"unknown key {key!r}." + (f" Did you mean {close!r}?" if close else "")
    message = str(fault["msg"]).removeprefix("Value error, ")
    value = fault["input"]
    shown = f"={value!r}" if not isinstance(value, dict | BaseModel) else ""
    return f"{key}{shown}: {message}" if key else message  # without one several sections are at odds


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of the configuration, sections included."""
    for name, info in model.model_fields.items():
        yield prefix + name
        for section in _sections(info.annotation):
            inner = "NAME." if info.annotation is not section and _is_mapping(info.annotation) else ""
            yield from known_keys(section, f"{prefix}{name}.{inner}")


def _is_mapping(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is dict


def _sections(annotation: Any) -> Iterable[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [arg for arg in get_args(annotation) if isinstance(arg, type) and issubclass(arg, BaseModel)]


def nearest_key(key: str) -> str | None:
    """Return the known key most like ``key``, or None where none is like it."""
    keys = list(known_keys())
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    if close:
        return close[0]
    last = key.rsplit(".", 1)[-1]
    same_name = [known for known in keys if known.rsplit(".", 1)[-1] == last]
    return same_name[0] if same_name else None


def dump(config: Config) -> str:
    """Return the configuration as YAML that `load_config` reads back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
