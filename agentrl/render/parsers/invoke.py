"""Calls of tags ``<invoke name="NAME">`` and ``<parameter name="KEY">``: MiniMax M2, DeepSeek V3.2 and V4, Step 3, ATEM."""

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
    read_json,
    truncated_call,
    unreadable_call,
)
from agentrl.render.parsers.values import parameter_types, read_value

_DSML = "｜DSML｜"
_MARK = "\ue000"
"""Stands for a sampled ``｜DSML｜``, so that the same characters spelt otherwise stay text."""


class InvokeParser(CallParser):
    """Parser of calls in a section of tags::

        OPENING
        <invoke name="NAME">
        <parameter name="KEY">VALUE</parameter>
        </invoke>
        CLOSING

    Strings are written as they are, all other values as JSON. An attribute ``string="true"`` or ``"false"`` of a parameter
    tells them apart, or else the schema. A value ends at the first closing tag that is followed by another parameter or the
    end of the call.

    Args:
        opening: marker that starts a section.
        closing: marker that ends it.
        prefix: of the tags' names, such as ``atem:``.
    """

    markers: tuple[str, ...] = ()

    def __init__(self, opening: str, closing: str, prefix: str = "") -> None:
        self.markers = (opening, closing)
        self._opening, self._closing = opening, closing
        self._tags = _Tags(prefix)

    @override
    def calls(self, pieces: Sequence[Piece], tools: Sequence[Tool]) -> list[ToolCall]:
        sections = list(self._sections(pieces))
        calls = [call for text, closed in sections for call in self._section(text, closed, tools)]
        outside = self._tags.count(self._text(pieces)) - sum(self._tags.count(text) for text, _ in sections)
        return calls + [unreadable_call(f"the call has no {self._opening}") for _ in range(outside)]

    def _text(self, pieces: Sequence[Piece]) -> str:
        return join_pieces(pieces)

    def _sections(self, pieces: Sequence[Piece]) -> Iterator[tuple[str, bool]]:
        opening, closing = self.markers
        return ((join_pieces(body), closed) for body, closed in between(pieces, opening, closing))

    def _section(self, text: str, closed: bool, tools: Sequence[Tool]) -> list[ToolCall]:
        schemas = {tool.name: tool.parameters for tool in tools}
        calls = list(self._tags.calls(text, closed, schemas))
        if calls:
            return calls
        fault = f"there is no <{self._tags.shown}invoke name=…> in the section of calls"
        return [unreadable_call(fault) if closed else truncated_call(self._closing)]


class MiniMaxParser(InvokeParser):
    """Parser of the calls of MiniMax M2."""

    def __init__(self) -> None:
        super().__init__("<minimax:tool_call>", "</minimax:tool_call>")


class Step3Parser(InvokeParser):
    """Parser of the calls of Step 3: ``function<｜tool_sep｜><steptml:invoke name="NAME">…`` between two tokens."""

    def __init__(self) -> None:
        super().__init__("<｜tool_call_begin｜>", "<｜tool_call_end｜>", "steptml:")


class AtemParser(InvokeParser):
    """Parser of the calls of Muse Glimmer, which are in a separate channel."""

    def __init__(self) -> None:
        super().__init__("<atem:function_calls>", "</atem:function_calls>", "atem:")


class DsmlParser(InvokeParser):
    """Parser of the calls of DeepSeek V3.2 (``function_calls``) and V4 (``tool_calls``), with ``｜DSML｜`` in every tag::

    <｜DSML｜function_calls><｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>…
    """

    _OPEN = re.compile(f"<{_MARK}(function|tool)_calls>")

    def __init__(self) -> None:
        super().__init__(f"<{_DSML}function_calls>", f"</{_DSML}function_calls>", _MARK)
        self.markers = (_DSML,)

    def _sections(self, pieces: Sequence[Piece]) -> Iterator[tuple[str, bool]]:
        text = self._text(pieces)
        opens = [*self._OPEN.finditer(text)]
        for index, opening in enumerate(opens):
            limit = opens[index + 1].start() if index + 1 < len(opens) else len(text)
            end = text.find(f"</{_MARK}{opening[1]}_calls>", opening.end(), limit)
            yield text[opening.end() : limit if end < 0 else end], end >= 0

    @override
    def _text(self, pieces: Sequence[Piece]) -> str:
        return "".join(_MARK if piece.marker else piece.text for piece in pieces)


class _Tags:
    """The tags of one prefix."""

    def __init__(self, prefix: str) -> None:
        self.shown = prefix.replace(_MARK, _DSML)
        tag = re.escape(prefix)
        self._invoke = re.compile(f'<{tag}invoke name="([^"<>\n]+)">')
        self._end = re.compile(f"\\s*</{tag}invoke>")
        self._parameter = re.compile(f'\\s*<{tag}parameter name="([^"<>\n]+)"(?: string="(true|false)")?>')
        self._value_end = re.compile(f"</{tag}parameter>(?=\\s*(?:<{tag}parameter name=|</{tag}invoke>))")

    def count(self, text: str) -> int:
        """Return the number of calls that begin in a text."""
        return sum(1 for _ in self._invoke.finditer(text))

    def calls(self, text: str, closed: bool, schemas: Mapping[str, Mapping[str, Any]]) -> Iterator[ToolCall]:
        """Iterate over the calls of a section. What follows a call that cannot be read is part of it."""
        at = 0
        while (opening := self._invoke.search(text, at)) is not None:
            name, at = opening[1].strip(), opening.end()
            arguments: dict[str, Any] = {}
            while (end := self._end.match(text, at)) is None:
                try:
                    key, value, at = self._argument(text, at, closed, schemas.get(name, {}))
                except ValueError as fault:
                    tag = f"</{self.shown}invoke>"
                    yield unreadable_call(f"{name}: {fault}", name) if closed else truncated_call(tag, name)
                    return
                arguments[key] = value
            at = end.end()
            yield ToolCall("", name, arguments)

    def _argument(self, text: str, at: int, closed: bool, schema: Mapping[str, Any]) -> tuple[str, Any, int]:
        """Return a parameter, its value, and where it ends.

        Raises:
            ValueError: there is none, or its value is not of its type.
        """
        opening = self._parameter.match(text, at)
        if opening is None:
            excerpt = text[at : at + 200].strip()[:80].replace(_MARK, _DSML)
            raise ValueError(f"{excerpt!r} stands where <{self.shown}parameter name=…> is due")
        key = opening[1]
        closing = self._value_end.search(text, opening.end())
        if closing is None:
            raise ValueError(f"the parameter {key} has no </{self.shown}parameter>")
        value = text[opening.end() : closing.start()].replace(_MARK, _DSML)
        try:
            if opening[2] is not None:
                return key, value if opening[2] == "true" else read_json(value), closing.end()
            return key, read_value(value, parameter_types(schema, key)), closing.end()
        except (ValueError, RecursionError) as fault:
            raise ValueError(f"the argument {key} is not valid JSON: {fault}") from fault
