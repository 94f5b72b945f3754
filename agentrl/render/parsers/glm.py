"""GLM and Hunyuan: keys and values in tags (GLM-4.5, Hy3); ``NAME`` and JSON below it (GLM-4); a JSON list (Hunyuan A13B)."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from typing_extensions import override

from agentrl.core.tool import Tool
from agentrl.core.types import ToolCall
from agentrl.render.parsers.base import (
    CALL_NAME,
    CallParser,
    Piece,
    between,
    closed_calls,
    join_pieces,
    open_ended_call,
    truncated_call,
    unopened_calls,
    unreadable_call,
)
from agentrl.render.parsers.json_lists import list_calls
from agentrl.render.parsers.values import parameter_types, read_value

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
ASSISTANT = "<|assistant|>"

_LONE_NAME = re.compile(r"\A\s*[\w.-]+\s*\Z")
_ORDER = (KEY, KEY_END, VALUE, VALUE_END)


class GlmParser(CallParser):
    """Parser of the calls of GLM-4.5 and later::

        <tool_call>NAME
        <arg_key>KEY</arg_key>
        <arg_value>VALUE</arg_value>
        </tool_call>

    Strings are written without quotes, all other values as JSON, so the schema is needed to tell them apart. If it allows both,
    or the tool is unknown, a JSON value other than a string is parsed as JSON.
    """

    markers = (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)

    @override
    def calls(self, pieces: Sequence[Piece], tools: Sequence[Tool]) -> list[ToolCall]:
        schemas = {tool.name: tool.parameters for tool in tools}
        calls = [_call(body, closed, schemas) for body, closed in between(pieces, OPEN, CLOSE)]
        unopened = (unopened_calls(pieces, OPEN, CLOSE, sign) for sign in (Piece(KEY, marker=True), _LONE_NAME))
        return calls + [call for unopened_list in unopened for call in unopened_list]


class Glm4Parser(CallParser):
    """Parser of the calls of GLM-4: sections of a turn separated by ``<|assistant|>``, with ``NAME`` on the first line and a
    JSON object below. No marker indicates a call, so a section of any other form is text.
    """

    markers = (ASSISTANT,)

    @override
    def calls(self, pieces: Sequence[Piece], tools: Sequence[Tool]) -> list[ToolCall]:
        tool_names = {tool.name for tool in tools}
        calls = (_section_call(join_pieces(section), tool_names) for section in _sections(pieces))
        return [call for call in calls if call is not None]


def _call(body: Sequence[Piece], closed: bool, schemas: Mapping[str, Mapping[str, Any]]) -> ToolCall:
    first_marker = next((index for index, piece in enumerate(body) if piece.marker), len(body))
    name = join_pieces(body[:first_marker]).strip()
    if not closed:
        return truncated_call(CLOSE, name)
    if not name:
        return unreadable_call(f"the call names no function after {OPEN}")
    schema = schemas.get(name, {})
    arguments: dict[str, Any] = {}
    try:
        pairs = list(_pairs(body[first_marker:]))
    except ValueError as fault:
        return unreadable_call(str(fault), name)
    for key, text in pairs:
        try:
            arguments[key] = read_value(text, parameter_types(schema, key))
        except (ValueError, RecursionError) as fault:
            return unreadable_call(f"the argument {key} of {name} is not valid JSON: {fault}", name)
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
        expected = _ORDER[at % len(_ORDER)]
        if marker != expected:
            raise ValueError(f"the call has {marker} where {expected} is due")
        if expected in (KEY_END, VALUE_END) and text.strip():
            raise ValueError(f"the call has {text.strip()[:80]!r} after {expected}")
    if len(fields) % len(_ORDER):
        raise ValueError(f"the call has {CLOSE} where {_ORDER[len(fields) % len(_ORDER)]} is due")
    for at in range(0, len(fields), len(_ORDER)):
        yield fields[at][1].strip(), fields[at + 2][1]


def _sections(pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
    start = 0
    for index, piece in enumerate(pieces):
        if piece.marker:
            yield pieces[start:index]
            start = index + 1
    yield pieces[start:]


def _section_call(text: str, tool_names: Container[str]) -> ToolCall | None:
    name, _, arguments = text.partition("\n")
    name, arguments = name.strip(), arguments.strip()
    if name not in tool_names and (not name or any(map(str.isspace, name)) or not arguments.startswith("{")):
        return None
    return open_ended_call(name, arguments)


SECTION, SECTION_END, SEP = "<tool_calls>", "</tool_calls>", "<tool_sep>"
SUFFIX = ":opensource"
"""Ends the name of every token of Hy3."""

_PLAIN = (SECTION, SECTION_END, SEP, OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)
_TAGS = {f"{marker[:-1]}{SUFFIX}>": marker for marker in _PLAIN}


class HunyuanParser(CallParser):
    """Parser of the calls of Hunyuan A13B and of Hy3, whose tags end with ``:opensource``::

    <tool_calls>[{"name": NAME, "arguments": {…}}, …]</tool_calls>
    <tool_calls><tool_call>NAME<tool_sep><arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>…</tool_calls>
    """

    markers = (*_PLAIN, *_TAGS)
    reasoning = (("<think>", "</think>"), (f"<think{SUFFIX}>", f"</think{SUFFIX}>"))

    @override
    def calls(self, pieces: Sequence[Piece], tools: Sequence[Tool]) -> list[ToolCall]:
        plain = [Piece(_TAGS.get(piece.text, piece.text), marker=True) if piece.marker else piece for piece in pieces]
        if not any(piece.marker and piece.text in (OPEN, CLOSE) for piece in plain):
            return closed_calls(plain, SECTION, SECTION_END, list_calls, CALL_NAME)
        skipped = (SECTION, SECTION_END, SEP)
        return GlmParser().calls([piece for piece in plain if not piece.marker or piece.text not in skipped], tools)
