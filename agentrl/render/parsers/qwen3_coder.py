"""Qwen3-Coder, Qwen3.5 and Nemotron 3: ``<tool_call>``, with tags for the function and its parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from typing_extensions import override

from agentrl.core.tool import Tool
from agentrl.core.types import ToolCall
from agentrl.render.parsers.base import (
    CallParser,
    Piece,
    between,
    join_pieces,
    truncated_call,
    unopened_calls,
    unreadable_call,
)
from agentrl.render.parsers.hermes import CLOSE, OPEN
from agentrl.render.parsers.values import parameter_types, read_value

_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)
_NAME = re.compile(r"\s*<function=([^<>\n]+)>")
_UNOPENED = re.compile(r"<function=[^<>\n]+>")
_OPENING = re.compile(r"\s*<parameter=([^<>\n]+)>\n?")
_CLOSING = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|\Z))")
"""The end of a value; a closing tag that is followed by anything else is part of the value."""

_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""The templates write these values in Python's notation instead of JSON's."""


class Qwen3CoderParser(CallParser):
    """Parser of the calls of these models::

        <tool_call>
        <function=NAME>
        <parameter=KEY>
        VALUE
        </parameter>
        </function>
        </tool_call>

    Strings are written without quotes, all other values as JSON; the schema tells them apart, as in GLM-4.5.
    """

    markers = (OPEN, CLOSE)

    @override
    def calls(self, pieces: Sequence[Piece], tools: Sequence[Tool]) -> list[ToolCall]:
        schemas = {tool.name: tool.parameters for tool in tools}
        calls = [_call(join_pieces(body), closed, schemas) for body, closed in between(pieces, OPEN, CLOSE)]
        return calls + unopened_calls(pieces, OPEN, CLOSE, _UNOPENED, needs_closing=False)


def _call(text: str, closed: bool, schemas: Mapping[str, Mapping[str, Any]]) -> ToolCall:
    name_match = _NAME.match(text)
    name = name_match[1].strip() if name_match else ""
    if not closed:
        return truncated_call(CLOSE, name)
    function = _FUNCTION.fullmatch(text)
    if function is None:
        return unreadable_call("the call is not <function=NAME> … </function>", name)
    schema = schemas.get(name, {})
    arguments: dict[str, Any] = {}
    try:
        for key, value in _parameters(function[2]):
            arguments[key] = _value(key, value, schema)
    except ValueError as fault:
        return unreadable_call(f"{name}: {fault}", name)
    return ToolCall("", name, arguments)


def _parameters(text: str) -> Iterator[tuple[str, str]]:
    """Iterate over the parameters and the text of their values.

    Raises:
        ValueError: there is something else.
    """
    at = 0
    while text[at:].strip():
        opening = _OPENING.match(text, at)
        closing = _CLOSING.search(text, opening.end()) if opening else None
        if opening is None:
            raise ValueError(f"{text[at:].strip()[:80]!r} stands where <parameter=…> is due")
        if closing is None:
            raise ValueError(f"the parameter {opening[1]} has no </parameter>")
        yield opening[1].strip(), text[opening.end() : closing.start()]
        at = closing.end()


def _value(key: str, text: str, schema: Mapping[str, Any]) -> Any:
    kinds = parameter_types(schema, key)
    try:
        return read_value(text if "string" in kinds else _PYTHON.get(text, text), kinds)
    except (ValueError, RecursionError) as fault:
        raise ValueError(f"the argument {key} is not valid JSON: {fault}") from fault
