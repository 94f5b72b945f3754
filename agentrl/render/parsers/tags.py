"""Plain XML tags: ``<NAME>…</NAME>``, where ``NAME`` is a tool offered to the policy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from typing_extensions import override

from agentrl.core.tool import Tool
from agentrl.core.types import ToolCall
from agentrl.render.parsers.base import CallParser, Piece, join_pieces, named_call, truncated_call, unreadable_call
from agentrl.render.parsers.values import parameter_types, read_value, subschema

_TAG = re.compile(r"<([A-Za-z_][\w.-]*)>")


class TagsParser(CallParser):
    """Parser of calls named by their tags, as custom prompts often request::

        <add>{"a": 1, "b": 2}</add>
        <add><a>1</a><b>2</b></add>
        <search>capital of France</search>

    Between the tags is a JSON object of arguments; or one tag per parameter, with a plain string or JSON as the schema
    requires; or plain text, if the tool's only required parameter is a string. Other tags are text. Tags are always parsed
    as characters, even if the tokenizer has a token for them.
    """

    markers: tuple[str, ...] = ()

    @override
    def calls(self, pieces: Sequence[Piece], tools: Sequence[Tool]) -> list[ToolCall]:
        return list(_calls(join_pieces(pieces), {tool.name: tool for tool in tools}))


def _calls(text: str, tools: Mapping[str, Tool]) -> Iterator[ToolCall]:
    if not tools:
        return
    names = "|".join(map(re.escape, tools))
    opening, unopened = re.compile(f"<({names})>"), re.compile(f"\\S\\s*</({names})>")
    at = 0
    ends: dict[str, int] = {}  # of the closing tag that was found last, so that none is searched for twice
    while True:
        tag = opening.search(text, at)
        for closing in unopened.finditer(text, at, len(text) if tag is None else tag.start()):
            yield unreadable_call(f"the call has no <{closing[1]}>", closing[1])
        if tag is None:
            return
        name, start = tag[1], tag.end()
        end = ends.get(name, 0)
        if 0 <= end < start:
            end = ends[name] = text.find(f"</{name}>", start)
        if end < 0 or text.find(tag[0], start, end) >= 0:
            yield truncated_call(f"</{name}>", name)
            at = start
        else:
            yield _call(tools[name], text[start:end].strip())
            at = end + len(name) + len("</>")


def _call(tool: Tool, body: str) -> ToolCall:
    schema, only = tool.parameters, _only_string(tool.parameters)
    if not body or (body == "null" and only is None):
        return ToolCall("", tool.name, {})
    if body.startswith("{") and (only is None or _is_object(body, only)):
        return named_call(tool.name, body)
    tag = _TAG.match(body)
    if tag is not None and (only is None or tag[1] in (subschema(schema, "properties") or ())):
        try:
            return ToolCall("", tool.name, _parameters(body, schema))
        except (ValueError, RecursionError) as fault:
            return unreadable_call(f"the call of {tool.name}: {fault}", tool.name)
    if only is not None:
        return ToolCall("", tool.name, {only: body})
    return unreadable_call(f"the call of {tool.name} is neither a JSON object nor one tag a parameter", tool.name)


def _only_string(schema: Mapping[str, Any]) -> str | None:
    """Return the only required parameter if it is a string, else None."""
    required = tuple(map(str, schema.get("required", ())))
    if len(required) != 1:
        return None
    name = required[0]
    return name if parameter_types(schema, name) == {"string"} else None


def _is_object(body: str, name: str) -> bool:
    """Return whether a text that starts with a brace looks like an object with the key ``name``."""
    return re.search(rf'["\']?{re.escape(name)}["\']?\s*:', body) is not None


def _parameters(body: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a sequence of tags.

    Raises:
        ValueError: it is not such a sequence, or a value is not of its type.
    """
    arguments: dict[str, Any] = {}
    while body:
        tag = _TAG.match(body)
        if tag is None:
            raise ValueError(f"{body[:40]!r} stands where a parameter's tag is due")
        name = tag[1]
        if name in arguments:
            raise ValueError(f"the parameter {name} is given twice")
        value, body = _value(body[tag.end() :], name)
        kinds = parameter_types(schema, name)
        try:
            arguments[name] = read_value(value if kinds == {"string"} else value.strip(), kinds)
        except (ValueError, RecursionError) as fault:
            raise ValueError(f"the parameter {name} is not valid JSON: {fault}") from None
    return arguments


def _value(text: str, name: str) -> tuple[str, str]:
    """Return the text of a parameter without the newlines at its ends, and the text after its closing tag.

    The closing tag is the first one followed by another parameter or nothing, so that a value may contain its text.
    """
    closing = f"</{name}>"
    at = text.find(closing)
    while at >= 0:
        text_after = text[at + len(closing) :].lstrip()
        if not text_after or _TAG.match(text_after):
            return text[:at].removeprefix("\n").removesuffix("\n"), text_after
        at = text.find(closing, at + 1)
    raise ValueError(f"the parameter {name} has no {closing}")
