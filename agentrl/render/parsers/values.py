"""Conversion of arguments given as text to values of the types in the tool's schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator

from agentrl.render.parsers.base import read_json

_KINDS = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_DEEPEST = 16  # a schema may refer to itself


def read_value(text: str, kinds: frozenset[str]) -> Any:
    """Return the value of ``text`` with one of the JSON types ``kinds``.

    Strings are written without quotes, all other values as JSON. If both are allowed, a JSON value other than a string is
    parsed as JSON.

    Raises:
        ValueError: it is not JSON, and strings are not allowed.
    """
    if kinds == {"string"}:
        return text
    try:
        value = read_json(text)
    except (ValueError, RecursionError):
        if "string" in kinds:
            return text
        raise
    if "string" not in kinds:
        return value
    fits = not isinstance(value, str) and any(Draft202012Validator.TYPE_CHECKER.is_type(value, kind) for kind in kinds)
    return value if fits else text


def json_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the JSON types that ``schema``, a subschema of ``root``, allows; all types if it does not restrict them."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return _KINDS
    if "$ref" in schema:
        return json_types(_resolve_reference(str(schema["$ref"]), root), root, depth + 1)
    if "type" in schema:
        types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        return _KINDS.intersection(types) or _KINDS
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        is_type = Draft202012Validator.TYPE_CHECKER.is_type
        return frozenset(kind for kind in _KINDS if any(is_type(value, kind) for value in values))
    options = [option for key in ("anyOf", "oneOf") for option in schema.get(key, ())]
    return frozenset[str]().union(*(json_types(option, root, depth + 1) for option in options)) or _KINDS


def parameter_types(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the JSON types that the schema of a tool allows for a parameter."""
    return json_types(subschema(subschema(schema, "properties"), name), schema)


def _resolve_reference(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the subschema of ``root`` that a reference such as ``#/$defs/Point`` names; None if there is none."""
    referred: Any = root
    for key in reference.removeprefix("#").strip("/").split("/"):
        referred = subschema(referred, key)
    return referred


def subschema(schema: Any, key: str) -> Any:
    """Return the value of ``key``; None if there is none, or ``schema`` is not an object."""
    return schema.get(key) if isinstance(schema, Mapping) else None
