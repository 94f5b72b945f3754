"""GLM: ``<tool_call>NAME``, then keys and values in tags (GLM-4.5); ``NAME`` and JSON below it (GLM-4)."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator

from agentrl.render.parsers.base import Piece, between, named_call, text_of, truncated, unreadable
from agentrl.tool import Tool
from agentrl.types import CallStatus, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
ASSISTANT = "<|assistant|>"

_KINDS = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_ORDER = (KEY, KEY_END, VALUE, VALUE_END)
_DEEPEST = 16  # a schema may refer to itself


class GlmParser:
    """Reads calls as GLM-4.5 and later write them::

        <tool_call>NAME
        <arg_key>KEY</arg_key>
        <arg_value>VALUE</arg_value>
        </tool_call>

    Strings stand there as they are, everything else as JSON, so the schema says which it is. Where it allows both, or the
    tool is unknown, JSON that is no string is read as JSON.
    """

    markers = (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)

    def calls(self, said: Sequence[Piece], tools: Sequence[Tool]) -> list[ToolCall]:
        """See `CallParser`."""
        schemas = {tool.name: tool.parameters for tool in tools}
        return [_call(body, closed, schemas) for body, closed in between(said, OPEN, CLOSE)]


class Glm4Parser:
    """Reads calls as GLM-4 writes them: parts of a turn that ``<|assistant|>`` divides, with ``NAME`` in the first line
    and a JSON object below. No marker tells a call, so a part of any other shape is text.
    """

    markers = (ASSISTANT,)

    def calls(self, said: Sequence[Piece], tools: Sequence[Tool]) -> list[ToolCall]:
        """See `CallParser`."""
        known = {tool.name for tool in tools}
        parts = (_named_part(text_of(part), known) for part in _divided(said))
        return [call for call in parts if call is not None]


def _call(body: Sequence[Piece], closed: bool, schemas: Mapping[str, Mapping[str, Any]]) -> ToolCall:
    marked = next((index for index, piece in enumerate(body) if piece.marker), len(body))
    name = text_of(body[:marked]).strip()
    if not closed:
        return truncated(CLOSE, name)
    if not name:
        return unreadable(f"the call names no function after {OPEN}")
    schema = schemas.get(name, {})
    arguments: dict[str, Any] = {}
    try:
        pairs = list(_pairs(body[marked:]))
    except ValueError as fault:
        return unreadable(str(fault), name)
    for key, text in pairs:
        try:
            arguments[key] = _value(text, _kinds(_part(_part(schema, "properties"), key), schema))
        except (ValueError, RecursionError) as fault:
            return unreadable(f"the argument {key} of {name} is not valid JSON: {fault}", name)
    return ToolCall("", name, arguments)


def _pairs(body: Sequence[Piece]) -> Iterator[tuple[str, str]]:
    """Iterate over keys and the text of their values in a body that starts with a marker.

    Raises:
        ValueError: there is something else.
    """
    fields: list[tuple[str, str]] = []  # a marker, and the text after it
    for piece in body:
        fields.append((piece.text, "") if piece.marker else (fields[-1][0], fields.pop()[1] + piece.text))
    for at, (marker, text) in enumerate(fields):
        due = _ORDER[at % len(_ORDER)]
        if marker != due:
            raise ValueError(f"the call has {marker} where {due} is due")
        if due in (KEY_END, VALUE_END) and text.strip():
            raise ValueError(f"the call has {text.strip()[:80]!r} after {due}")
    if len(fields) % len(_ORDER):
        raise ValueError(f"the call has {CLOSE} where {_ORDER[len(fields) % len(_ORDER)]} is due")
    for at in range(0, len(fields), len(_ORDER)):
        yield fields[at][1].strip(), fields[at + 2][1]


def _value(text: str, kinds: frozenset[str]) -> Any:
    """Return what ``text`` is as a value that may be of ``kinds``.

    Raises:
        ValueError: it is not JSON, and may not be a string.
    """
    if kinds == {"string"}:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        if "string" in kinds:
            return text
        raise
    if "string" not in kinds:
        return value
    fits = not isinstance(value, str) and any(Draft202012Validator.TYPE_CHECKER.is_type(value, kind) for kind in kinds)
    return value if fits else text


def _kinds(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the JSON types that a value may have by ``schema``, a part of ``root``; all where it does not say."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return _KINDS
    if "$ref" in schema:
        return _kinds(_referred(str(schema["$ref"]), root), root, depth + 1)
    if "type" in schema:
        named = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        return _KINDS.intersection(named) or _KINDS
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        is_type = Draft202012Validator.TYPE_CHECKER.is_type
        return frozenset(kind for kind in _KINDS if any(is_type(value, kind) for value in values))
    either = [part for key in ("anyOf", "oneOf") for part in schema.get(key, ())]
    return frozenset[str]().union(*(_kinds(part, root, depth + 1) for part in either)) or _KINDS


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the part of ``root`` that a reference such as ``#/$defs/Point`` names; None where it names none."""
    found: Any = root
    for key in reference.removeprefix("#").strip("/").split("/"):
        found = _part(found, key)
    return found


def _part(schema: Any, key: str) -> Any:
    return schema.get(key) if isinstance(schema, Mapping) else None


def _divided(said: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
    start = 0
    for index, piece in enumerate(said):
        if piece.marker:
            yield said[start:index]
            start = index + 1
    yield said[start:]


def _named_part(text: str, known: Container[str]) -> ToolCall | None:
    name, _, arguments = text.partition("\n")
    name, arguments = name.strip(), arguments.strip()
    if name not in known and (not name or any(map(str.isspace, name)) or not arguments.startswith("{")):
        return None
    call = named_call(name, arguments)
    cut_off = call.status is not CallStatus.OK and not arguments.endswith("}")
    return truncated("}", name) if cut_off else call
