"""Merging of configuration layers, and of a source's settings with those of its run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.config.algo import AdvantageConfig, LossConfig
from agentrl.config.tasks import DataSourceConfig

Tree = dict[str, Any]
Key = tuple[str, ...]
"""The names that lead to a value."""
_NAMED: dict[Key, str] = {
    ("algo", "advantage"): AdvantageConfig().name,
    ("algo", "loss"): LossConfig().name,
    ("tasks", "data_source"): DataSourceConfig().name,
}
"""Sections whose options belong to a name, with the default name."""


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tree:
    """Return ``above`` merged over ``below``, mapping by mapping."""
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tree:
    """Return ``above`` merged over ``below``, without options of an estimator, loss or data source that ``above`` replaces."""
    for key in replaced_options(below, above):
        below = _without(below, key)
    return merge(below, above)


def replaced_options(below: Mapping[str, Any], above: Mapping[str, Any]) -> list[Key]:
    """Return the keys of options below whose estimator, loss or data source ``above`` replaces, those of sources included."""
    option_keys: list[Key] = []
    for prefix in ((), *(("sources", name) for name in _section(above, ("sources",)))):
        for key, default in _NAMED.items():
            new = _section(above, (*prefix, *key))
            old = _section(below, (*prefix, *key)).get("name") or _section(below, key).get("name", default)
            if "name" in new and new["name"] != old:
                option_keys.append((*prefix, *key, "options"))
    return option_keys


def _section(tree: Mapping[str, Any], key: Key) -> Mapping[str, Any]:
    """Return the mapping at a key, or an empty one if there is none."""
    for name in key:
        value = tree.get(name)
        tree = value if isinstance(value, Mapping) else {}
    return tree


def _without(tree: Mapping[str, Any], key: Key) -> Tree:
    """Return a copy of the tree without the value at a key."""
    name, *inner_key = key
    without_name = {sibling: value for sibling, value in tree.items() if sibling != name}
    subtree = tree.get(name)
    return (
        {**without_name, name: _without(subtree, tuple(inner_key))}
        if inner_key and isinstance(subtree, Mapping)
        else without_name
    )
