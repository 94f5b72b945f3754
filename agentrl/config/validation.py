"""Sections from mappings. Errors name the full key, and for an unknown key the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from agentrl.config.base import Section
from agentrl.core.errors import ConfigError

S = TypeVar("S", bound=Section)


def parse_section(section: type[S], values: Mapping[str, Any], prefix: str = "", other_keys: Sequence[str] = ()) -> S:
    """Return ``values`` as a section.

    Args:
        section: the class.
        values: keys and values of the section, nested.
        prefix: put before every key in messages, such as ``tools.python.options.``.
        other_keys: keys that are valid next to the section's own, and parsed elsewhere.

    Raises:
        ConfigError: one line for every fault, each with its key.
    """
    try:
        return section.model_validate(dict(values))
    except ValidationError as error:
        keys = [*all_keys(section), *other_keys]
        raise ConfigError("\n".join(_describe(fault, prefix, keys) for fault in error.errors())) from None


def _describe(fault: Mapping[str, Any], prefix: str, keys: Sequence[str]) -> str:
    key = ".".join(str(name) for name in fault["loc"])
    if fault["type"] == "extra_forbidden":
        suggestion = nearest_key(key, keys)
        hint = (
            f" Did you mean {prefix + suggestion!r}?"
            if suggestion
            else f" Known: {', '.join(siblings(key, keys)) or 'none'}."
        )
        return f"unknown key {prefix + key!r}.{hint}"
    value = fault["input"]
    shown = f"={value!r}" if not isinstance(value, dict | BaseModel) else ""
    return f"{prefix}{key}{shown}: {str(fault['msg']).removeprefix('Value error, ')}"


def all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a section and its subsections, the subsections' own included."""
    for field, info in model.model_fields.items():
        name = info.alias or field
        yield prefix + name
        for section in subsections(info.annotation):
            inner = "NAME." if info.annotation is not section and _is_mapping(info.annotation) else ""
            yield from all_keys(section, f"{prefix}{name}.{inner}")


def subsections(annotation: Any) -> Iterable[type[BaseModel]]:
    """Return the sections in a field's type: the type itself, or those that a container holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [arg for arg in get_args(annotation) if isinstance(arg, type) and issubclass(arg, BaseModel)]


def _is_mapping(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is dict


def nearest_key(key: str, keys: Sequence[str]) -> str | None:
    """Return the key most like ``key``, else one with the same last name, else None."""
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    if close:
        return close[0]
    last_name = key.rpartition(".")[2]
    return next((candidate for candidate in keys if candidate.rpartition(".")[2] == last_name), None)


def siblings(key: str, keys: Sequence[str]) -> list[str]:
    """Return the names of the keys in the section that ``key`` is in."""
    section = key.rpartition(".")[0]
    return [other_key.rpartition(".")[2] for other_key in keys if other_key.rpartition(".")[0] == section]
