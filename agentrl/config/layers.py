"""Layers of a configuration: each value with its origin, differences of two configurations, and the files of a run's folder.

::

    config.yaml     all keys, with `REDACTED` in place of secrets
    secrets.yaml    the secrets alone, mode 0600; absent if there are none
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from agentrl.config.checks import Rule
from agentrl.config.load import read_yaml, validate
from agentrl.config.merging import Key, Tree, merge, overlay, replaced_options
from agentrl.config.schema import Config
from agentrl.config.secret_values import REDACTED, redact, secret_part
from agentrl.config.yaml_text import dump_yaml
from agentrl.core.atomic_files import write_atomically, write_private
from agentrl.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layer:
    """Values of one origin. A later layer overrides an earlier one key by key."""

    origin: str
    """For users: ``preset search_r1/cpu``, ``--config lr.yaml``, ``command line``."""
    tree: Tree
    """The values, nested."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A key with two values, as text without secrets."""

    key: str
    before: str
    after: str

    def __str__(self) -> str:
        """Return one line for the user."""
        return f"{self.key}: {self.before} → {self.after}"


def merge_layers(layers: Sequence[Layer]) -> Tree:
    """Return the values of all layers; a later layer overrides an earlier one."""
    tree: Tree = {}
    for layer in layers:
        tree = overlay(tree, layer.tree)
    return tree


def load_layers(layers: Sequence[Layer], rules: Sequence[Rule] = ()) -> Config:
    """Return the configuration of all layers.

    Raises:
        ConfigError: as in `validate`.
    """
    return validate(merge_layers(layers), rules)


def differences(old_config: Config, new_config: Config) -> list[Difference]:
    """Return the keys in which two configurations differ, in the order of the second."""
    old, new = (dict(_leaves(config.model_dump(mode="json"))) for config in (old_config, new_config))
    secret = dict(_leaves(secret_part(merge(old_config.model_dump(mode="json"), new_config.model_dump(mode="json")))))
    changes = []
    for key in [*new, *(key for key in old if key not in new)]:
        if key not in new or key not in old or new[key] != old[key]:
            texts = [REDACTED if key in secret else _text(values.get(key)) for values in (old, new)]
            changes.append(Difference(".".join(key), *texts))
    return changes


def leaf_texts(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of a nested mapping as text by key, such as ``learner.optimizer.lr``; without null and empty mappings."""
    return {".".join(map(str, key)): _text(value) for key, value in _leaves(tree) if value not in (None, {})}


def annotate(config: Config, layers: Sequence[Layer]) -> str:
    """Return the configuration of ``layers`` as YAML, with the origin of every value as a comment; secrets are redacted."""
    tree = redact(config.model_dump(mode="json"))
    origins: dict[Key, str] = {}
    for number, layer in enumerate(layers):
        for replaced in replaced_options(merge_layers(layers[:number]), layer.tree):
            origins = {key: origin for key, origin in origins.items() if key[: len(replaced)] != replaced}
        origins |= {key: layer.origin for key, _ in _leaves(layer.tree)}
    lines = list(_lines(tree, origins, ()))
    width = min(60, max(len(line) for line, _ in lines))
    return "".join(f"{line:<{width}}  # {origin}\n" if origin else f"{line}\n" for line, origin in lines)


def _lines(tree: Mapping[str, Any], origins: Mapping[Key, str], prefix: Key) -> Iterator[tuple[str, str]]:
    """Yield the lines of a mapping in YAML, each with the origin of its value; sections have none."""
    for name, value in tree.items():
        key, indent = (*prefix, name), "  " * len(prefix)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{_text(name)}:", ""
            yield from _lines(value, origins, key)
        else:
            # A value may be from a layer that set the section as a whole, such as `eval.sets=null`.
            value_origins = (origins[key[:length]] for length in range(len(key), 0, -1) if key[:length] in origins)
            yield f"{indent}{_text(name)}: {_text(value)}", next(value_origins, "default")


def _leaves(tree: Mapping[str, Any], prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yield the values of a nested mapping that are no mappings, or empty ones."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*prefix, name))
        else:
            yield (*prefix, name), value


def _text(value: object) -> str:
    """Return a value as YAML on one line."""
    if value is None or isinstance(value, bool | int):
        return json.dumps(value)
    if type(value) is float:
        return _text_of_float(repr(value))
    if value == []:
        return "[]"
    return _text_of_string(value) if type(value) is str else _dump_on_one_line(value)


@lru_cache(maxsize=4096)
def _text_of_string(value: str) -> str:
    """Return a text as YAML on one line; a configuration has a thousand names, and YAML takes 100 µs for each."""
    return _dump_on_one_line(value)


@lru_cache(maxsize=4096)
def _text_of_float(digits: str) -> str:
    """Return a float as YAML; by its digits, as 0.0 and -0.0 are equal."""
    return _dump_on_one_line(float(digits))


def _dump_on_one_line(value: object) -> str:
    for style in (None, '"'):  # in double quotes line breaks are escaped
        text = dump_yaml(value, flow=True, style=style, allow_unicode=str(value).isprintable())
        text = text.removesuffix("\n").removesuffix("\n...")
        if "\n" not in text:
            break
    return text


CONFIG = "config.yaml"
SECRETS = "secrets.yaml"


def save_config(config: Config, folder: Path) -> None:
    """Write the configuration of a run to its folder."""
    tree = config.model_dump(mode="json")
    secrets = secret_part(tree)
    if secrets:
        write_private(folder / SECRETS, dump_yaml(secrets))
    else:
        (folder / SECRETS).unlink(missing_ok=True)
    with write_atomically(folder / CONFIG) as partial:
        partial.write_text(dump_yaml(redact(tree)), encoding="utf-8")


def saved_layers(folder: Path) -> list[Layer]:
    """Return the configuration that `save_config` wrote.

    Raises:
        ConfigError: a file cannot be read.
    """
    return [Layer(str(file), _values(file)) for file in config_files(folder)]


def config_files(folder: Path) -> list[Path]:
    """Return the files that `save_config` wrote, to be given to a command as ``--config``, in this order."""
    secrets = folder / SECRETS
    return [folder / CONFIG, *([secrets] if secrets.is_file() else [])]


def _values(file: Path) -> Tree:
    tree = read_yaml(file)
    if not tree:
        raise ConfigError(f"configuration {file}: the file is empty")
    return tree
