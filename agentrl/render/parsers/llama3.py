"""Llama 3.1 and later: ``{"name": …, "parameters": {…}}``, with or without ``<|python_tag|>`` before it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from agentrl.core.tool import Tool
from agentrl.core.types import ToolCall
from agentrl.render.parsers.base import (
    CallParser,
    Piece,
    join_pieces,
    json_call,
    read_json,
    truncated_call,
    unreadable_call,
)
from agentrl.render.parsers.pythonic import JSON, PYTHON, closing, next_position, positions, python_calls

TAG = "<|python_tag|>"

ARGUMENTS = ("parameters", "arguments")

_OBJECT = re.compile(r"^[^\S\n]*(\{)", re.MULTILINE)
_NEXT = re.compile(r"[\s;,]*(\{)")
"""The start of the next call after a call."""
_BUILTIN = re.compile(r"[^\W\d]\w*\.call\s*(\()")
"""``brave_search.call(query="…")``: calls of Llama 3.1's built-in tools."""
_UNFINISHED = re.compile(r"[\w.]*\s*")
"""Text at the end of a turn that could be the start of such a call, or nothing."""

_STARTS = (
    '{"name":',
    '{"parameters":',
    '{"arguments":',
    '{"type":"function","name":',
    '{"type":"function","parameters":',
)
"""Starts of calls, without white space."""


class Llama3Parser(CallParser):
    """Parser of JSON objects: at the start of a line those that are calls, after ``<|python_tag|>`` all of them.

    An object is a call if it has a name and arguments, or the name of a tool. Several calls may follow each other,
    separated by ``;`` or a newline.
    """

    markers = (TAG,)

    @override
    def calls(self, pieces: Sequence[Piece], tools: Sequence[Tool]) -> list[ToolCall]:
        return list(_read(join_pieces(pieces), positions(pieces, TAG), {tool.name for tool in tools}))


def _read(text: str, tags: Sequence[int], names: set[str]) -> Iterator[ToolCall]:
    """Iterate over the calls in text, with a tag at each of ``tags``; calls inside an object are part of it."""
    at: int | None = 0
    follows_call = False
    while at is not None:
        tag = next_position(tags, at, len(text))
        opening = (follows_call and _NEXT.match(text, at, tag)) or _OBJECT.search(text, at, tag)
        if opening:
            call, at = _object(text, opening.start(1), names)
        elif tag < len(text):
            call, at = _read_tagged_call(text, tag + len(TAG))
        else:
            return
        follows_call = call is not None
        if call is not None:
            yield call


def _object(text: str, start: int, names: set[str]) -> tuple[ToolCall | None, int | None]:
    """Return the call of the object at ``start``, or None if it is not a call, and its end, or None if it is not closed."""
    end = closing(text, start, JSON)
    if end is not None:
        return _call(text[start:end], names), end
    return (
        truncated_call("}") if _starts_like_call(text[start:]) else None
    ), None  # the rest of the text is inside of it


def _read_tagged_call(text: str, start: int) -> tuple[ToolCall, int | None]:
    """Return the call after a tag, valid or not, and its end, or None if it is not closed."""
    while text[start : start + 1].isspace():
        start += 1
    builtin = _BUILTIN.match(text, start)
    if builtin is not None:
        end = closing(text, builtin.start(1), PYTHON)
        if end is None:
            return truncated_call(")"), None
        call = python_calls(text[start:end])[0]
        return replace(call, name=call.name.removesuffix(".call")), end
    if text.startswith("{", start):
        end = closing(text, start, JSON)
        return (truncated_call("}") if end is None else json_call(text[start:end], arguments=ARGUMENTS)), end
    if _UNFINISHED.fullmatch(text, start):
        return truncated_call("}"), None
    return unreadable_call(f'what follows {TAG} is not a JSON object with a "name"'), start


def _call(text: str, names: set[str]) -> ToolCall | None:
    """Return the call of an object, valid or not; None if it is ordinary JSON."""
    try:
        value: Any = read_json(text)
    except (ValueError, RecursionError):
        return json_call(text, arguments=ARGUMENTS) if _starts_like_call(text) else None
    name = value.get("name")
    names_tool = isinstance(name, str) and name in names
    if names_tool or (name is not None and any(key in value for key in ARGUMENTS)):
        return json_call(text, arguments=ARGUMENTS)
    return None


def _starts_like_call(text: str) -> bool:
    """Return whether an object that cannot be parsed starts like a call."""
    start = "".join(text[:200].replace("'", '"').split())
    return any(start.startswith(call_start) or call_start.startswith(start) for call_start in _STARTS)
