"""Llama 3.1 and later: ``{"name": …, "parameters": {…}}``, with or without ``<|python_tag|>`` before it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from agentrl.render.parsers.base import Piece, json_call, text_of, truncated, unreadable
from agentrl.render.parsers.brackets import JSON, PYTHON, closing
from agentrl.render.parsers.pythonic import python_calls
from agentrl.tool import Tool
from agentrl.types import ToolCall

TAG = "<|python_tag|>"

ARGUMENTS = ("parameters", "arguments")

_OBJECT = re.compile(r"^[^\S\n]*(\{)", re.MULTILINE)
_NEXT = re.compile(r"[\s;,]*(\{)")
"""Behind a call, the next one."""
_BUILTIN = re.compile(r"[^\W\d]\w*\.call\s*(\()")
"""``brave_search.call(query="…")``: how Llama 3.1 calls the tools that it was trained with."""
_UNFINISHED = re.compile(r"[\w.]*")
"""As far as the turn goes, that or nothing."""

_STARTS = (
    '{"name":',
    '{"parameters":',
    '{"arguments":',
    '{"type":"function","name":',
    '{"type":"function","parameters":',
)
"""How a call starts, white space left out."""


class Llama3Parser:
    """Reads JSON objects: at the start of a line those that are calls, behind ``<|python_tag|>`` any.

    An object is a call if it has a name and arguments, or the name of a tool. Several may follow each other, with
    ``;`` or a newline between them.
    """

    markers = (TAG,)

    def calls(self, said: Sequence[Piece], tools: Sequence[Tool]) -> list[ToolCall]:
        """See `CallParser`."""
        names = {tool.name for tool in tools}
        tags = [index for index, piece in enumerate(said) if piece.marker and piece.text == TAG]
        tags.append(len(said))
        calls = list(_in_text(text_of(said[: tags[0]]), names))
        for tag, following in pairwise(tags):
            calls += _behind_tag(text_of(said[tag + 1 : following]), names)
        return calls


def _behind_tag(text: str, names: set[str]) -> Iterator[ToolCall]:
    text = text.strip()
    builtin = _BUILTIN.match(text)
    if builtin is not None:
        yield _builtin(text, builtin.start(1))
    elif text.startswith("{"):
        end = closing(text, 0, JSON)
        yield truncated("}") if end is None else json_call(text[:end], arguments=ARGUMENTS)
        if end is not None:
            yield from _in_text(text, names, end)
    elif _UNFINISHED.fullmatch(text):
        yield truncated("}")
    else:
        yield unreadable(f'what follows {TAG} is not a JSON object with a "name"')


def _builtin(text: str, opening: int) -> ToolCall:
    end = closing(text, opening, PYTHON)
    if end is None:
        return truncated(")")
    call = python_calls(text[:end])[0]
    return replace(call, name=call.name.removesuffix(".call"))


def _in_text(text: str, names: set[str], behind: int | None = None) -> Iterator[ToolCall]:
    """Iterate over the calls in text.

    Args:
        text: what was said.
        names: of the tools offered.
        behind: where a call ended, if one did; what comes before is left out.
    """
    at = behind or 0
    while (found := (behind is not None and _NEXT.match(text, at)) or _OBJECT.search(text, at)) is not None:
        start = found.start(1)
        end = closing(text, start, JSON)
        if end is None:  # whatever follows is within it
            if _begun(text[start:]):
                yield truncated("}")
            return
        call = _call(text[start:end], names)
        if call is not None:
            yield call
        at, behind = end, end if call is not None else None


def _call(text: str, names: set[str]) -> ToolCall | None:
    """Return the call that an object makes, whether or not it is well formed; None if it is ordinary JSON."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return json_call(text, arguments=ARGUMENTS) if _begun(text) else None
    name = value.get("name")
    of_a_tool = isinstance(name, str) and name in names
    if of_a_tool or (name is not None and any(key in value for key in ARGUMENTS)):
        return json_call(text, arguments=ARGUMENTS)
    return None


def _begun(text: str) -> bool:
    """Return whether an object that cannot be read starts as calls do, as far as it goes."""
    start = "".join(text[:200].replace("'", '"').split())
    return any(start.startswith(whole) or whole.startswith(start) for whole in _STARTS)
