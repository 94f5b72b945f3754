"""Sections from mappings. Errors name the full key, and for an unknown key the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from agentrl.config.base import Section
from agentrl.config.secret_values import REDACTED, shown_value
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
        by_key: dict[tuple[str, ...], list[ErrorDetails]] = {}
        for fault in error.errors():
            location = fault["loc"][:-1] if _lacks_entry(fault) else fault["loc"]
            by_key.setdefault(_key(section, location), []).append(fault)
        keys = [*all_keys(section), *other_keys]
        raise ConfigError("\n".join(_describe(key, faults, prefix, keys) for key, faults in by_key.items())) from None


def _lacks_entry(fault: ErrorDetails) -> bool:
    """Return whether a list of a fixed length is too short; pydantic reports every entry that it lacks."""
    return fault["type"] == "missing" and isinstance(fault["input"], list | tuple)


def _key(section: type[BaseModel], location: Sequence[int | str]) -> tuple[str, ...]:
    """Return the names in the place of a fault, without what pydantic adds: the members of unions."""
    names: list[str] = []
    annotation: object = section
    for name in location:
        is_union = get_origin(annotation) in (Union, UnionType)
        members = [arg for arg in get_args(annotation) if arg is not NoneType] if is_union else [annotation]
        annotation = members[0]
        if len(members) > 1:
            annotation = None  # this name is that of a member
        elif name != "[key]":
            names.append(str(name))
            annotation = _inner_type(annotation, name)
    return tuple(names)


def _inner_type(annotation: object, name: int | str) -> object:
    """Return the type of a value in a section, mapping or list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        by_name = {info.alias or field: info.annotation for field, info in annotation.model_fields.items()}
        return by_name.get(str(name))
    return get_args(annotation)[-1] if get_args(annotation) else None


def _describe(names: tuple[str, ...], faults: Sequence[ErrorDetails], prefix: str, keys: Sequence[str]) -> str:
    """Return one line on a key. A key of several types has a fault for each."""
    key, fault = ".".join(names), faults[0]
    if fault["type"] == "extra_forbidden":
        suggestion = nearest_key(key, keys)
        if suggestion == key:
            nested = "".join(f"{{{name}: " for name in key.split(".")) + "…" + "}" * len(key.split("."))
            return f"unknown key {prefix + key!r}: a name has no dots in a file; write {nested[1:-1]}"
        hint = (
            f" Did you mean {prefix + suggestion!r}?"
            if suggestion
            else f" Known: {', '.join(siblings(key, keys)) or 'none'}."
        )
        return f"unknown key {prefix + key!r}.{hint}"
    value = fault["input"]
    shown = "" if isinstance(value, dict | BaseModel) else shown_value((*prefix.split("."), *names), value)
    messages = [str(other["msg"]).removeprefix("Value error, ") for other in faults]
    if shown == REDACTED:
        messages = [message.replace(str(value), REDACTED) for message in messages]
    if fault["type"] in ("model_type", "dict_type"):
        meant = next((k for k in (f"{key}.name", f"{key}.path") if k in keys and isinstance(value, str)), None)
        messages = ["this is a section and needs keys" + (f"; set {prefix}{meant}={value}" if meant else "")]
    elif _lacks_entry(fault):
        messages = [f"a list of {len(value)} is too short"]
    elif fault["type"] in ("string_type", "path_type"):
        messages = ["this is text; put it in quotes"]
    alternatives = [message.removeprefix("Input should be ") for message in dict.fromkeys(messages[1:])]
    return f"{prefix}{key}{shown and '=' + shown}: {' or '.join([messages[0], *alternatives])}"


def all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a section and its subsections, the subsections' own included."""
    for field, info in model.model_fields.items():
        name = info.alias or field
        yield prefix + name
        for section in subsections(info.annotation):
            inner = "NAME." if info.annotation is not section and get_origin(info.annotation) is dict else ""
            yield from all_keys(section, f"{prefix}{name}.{inner}")


def subsections(annotation: object) -> Iterable[type[BaseModel]]:
    """Return the sections in a field's type: the type itself, or those that a container holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [arg for arg in get_args(annotation) if isinstance(arg, type) and issubclass(arg, BaseModel)]


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
