"""The contract of tool-call parsers, and functions that several of them use."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn, Protocol, runtime_checkable

from agentrl.core.tool import Tool
from agentrl.core.types import THINK, THINK_END, CallStatus, ToolCall


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of the text of a turn."""

    text: str
    """The characters."""
    marker: bool = False
    """Whether it is one of the format's markers. If the tokenizer has a token for a marker, only that token is one, not the
    same characters spelt with other tokens."""


class CallParser(Protocol):
    """Parser of the tool calls of one format."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The strings that structure the format, such as ``<tool_call>``."""
        ...

    def calls(self, pieces: Sequence[Piece], tools: Sequence[Tool]) -> list[ToolCall]:
        """Return every attempt at a call after the reasoning, in order, each with a status. Never raises.

        The status does not depend on the tools: it is ``OK``, ``INVALID_JSON`` or ``TRUNCATED``. Ids are empty if the
        format has none.

        Args:
            pieces: pieces in order, without the end token.
            tools: tools offered to the policy, for formats whose arguments can be parsed only with the schema's types.
        """
        ...


@runtime_checkable
class OwnReasoning(Protocol):
    """A parser of a family whose reasoning has other markers than ``<think>``."""

    @property
    def reasoning(self) -> Sequence[tuple[str, str]]:
        """Markers that start and end reasoning; empty if the parser itself tells reasoning from calls."""
        ...


@runtime_checkable
class OwnText(Protocol):
    """A parser of a family that writes the text of turns between markers, too."""

    def split_text(self, pieces: Sequence[Piece]) -> tuple[str, str]:
        """Return reasoning and text of a turn; see `Renderer.split_turn`."""
        ...


def reasoning_markers(parser: CallParser) -> Sequence[tuple[str, str]]:
    """Return the markers that start and end reasoning in a parser's family."""
    return parser.reasoning if isinstance(parser, OwnReasoning) else ((THINK, THINK_END),)


def split_markers(texts: Sequence[str], markers: Sequence[str]) -> Iterator[Piece]:
    """Iterate over the pieces of texts that may contain ``markers`` as plain characters; linear in the texts."""
    if not markers:
        yield from map(Piece, filter(None, texts))
        return
    for text in texts:
        for index, piece in enumerate(_marker_pattern(tuple(markers)).split(text)):
            if piece:
                yield Piece(piece, marker=index % 2 == 1)


@lru_cache(maxsize=64)
def _marker_pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(markers, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})")


def split_reasoning(
    pieces: Sequence[Piece], *, opened: bool, markers: Sequence[tuple[str, str]] = ((THINK, THINK_END),)
) -> tuple[Sequence[Piece], Sequence[Piece]]:
    """Return the reasoning, and the pieces after it: all after its last end; none if the reasoning is not closed.

    Args:
        pieces: pieces of one turn.
        opened: whether the prompt ended with the start of reasoning.
        markers: that start and end reasoning.
    """
    starts, ends = {start for start, _ in markers}, {end for _, end in markers}
    reasoning: Sequence[Piece] = ()
    for index in range(len(pieces) - 1, -1, -1):
        if pieces[index].marker and pieces[index].text in ends:
            reasoning, pieces = pieces[:index], pieces[index + 1 :]
            opened = False
            break
    if opened:
        return pieces, ()
    for index, piece in enumerate(pieces):
        if piece.marker and piece.text in starts:
            return (*reasoning, *pieces[index:]), pieces[:index]
    return reasoning, pieces


def between(pieces: Sequence[Piece], opening: str, closing: str) -> Iterator[tuple[Sequence[Piece], bool]]:
    """Iterate over the pieces between each ``opening`` and its ``closing``, and whether it was closed.

    A second ``opening`` before the ``closing`` leaves the first one unclosed.
    """
    start: int | None = None
    for index, piece in enumerate(pieces):
        if piece.marker and piece.text in (opening, closing):
            if start is not None:
                yield pieces[start:index], piece.text == closing
            start = index + 1 if piece.text == opening else None
    if start is not None:
        yield pieces[start:], False


CALL_NAME = re.compile(r'"(?:name|tool_name)"\s*:')
"""A sign of a call that is a JSON object."""


def unopened_calls(
    pieces: Sequence[Piece], opening: str, closing: str, sign: re.Pattern[str] | Piece, *, needs_closing: bool = True
) -> list[ToolCall]:
    """Return an unreadable call for each text with a ``sign`` of a call that no ``opening`` precedes.

    Args:
        pieces: pieces of one turn.
        opening: marker that starts a call.
        closing: marker that ends it.
        sign: text that a call of this format has, or one of its markers.
        needs_closing: whether the sign may also be in ordinary text, so that the text is a call only if it is closed.
    """
    calls: list[ToolCall] = []
    start, is_open = 0, False
    for index, piece in enumerate((*pieces, None)):
        if piece is not None and not (piece.marker and piece.text in (opening, closing)):
            continue
        closed = piece is not None and piece.text == closing
        if not is_open and (closed or not needs_closing):
            outside = pieces[start:index]
            if sign in outside if isinstance(sign, Piece) else sign.search(join_pieces(outside)):
                calls.append(unreadable_call(f"the call has no {opening}"))
        is_open, start = piece is not None and piece.text == opening, index + 1
    return calls


def closed_calls(
    pieces: Sequence[Piece], opening: str, closing: str, read: Callable[[str], list[ToolCall]], sign: re.Pattern[str]
) -> list[ToolCall]:
    """Return the calls that ``read`` finds in the text between two markers, and a fault for each that lacks one of them."""
    calls = [
        call
        for body, closed in between(pieces, opening, closing)
        for call in (read(join_pieces(body).strip()) if closed else [truncated_call(closing)])
    ]
    return calls + unopened_calls(pieces, opening, closing, sign)


def join_pieces(pieces: Sequence[Piece]) -> str:
    """Return the text of pieces, markers included."""
    return "".join(piece.text for piece in pieces)


def truncated_call(closing: str, name: str = "") -> ToolCall:
    """Return a call that was not closed."""
    return ToolCall("", name, {}, CallStatus.TRUNCATED, f"the call is cut off: it has no {closing}")


def unreadable_call(fault: str, name: str = "") -> ToolCall:
    """Return a call that cannot be parsed, with the reason ``fault``."""
    return ToolCall("", name, {}, CallStatus.INVALID_JSON, fault)


def read_json(text: str) -> Any:
    """Return the value of strict JSON. Python's parser also accepts ``NaN``, ``Infinity`` and ``1e999``, which could not be
    sent to a tool server.

    Raises:
        ValueError: it is not JSON.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, parse_constant=_no_number, parse_float=_finite)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def json_call(text: str, *, arguments: Sequence[str] = ("arguments", "parameters")) -> ToolCall:
    """Return the call of a JSON object ``{"name": …, "arguments": {…}}``.

    Args:
        text: text of the object.
        arguments: possible keys of the arguments, the usual one first. A missing key means no arguments.
    """
    try:
        value = read_json(text)
    except (ValueError, RecursionError) as error:  # JSONDecodeError is a ValueError
        return unreadable_call(f"the call is not valid JSON: {error}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return unreadable_call('the call is not a JSON object with a "name"')
    call_arguments: Any = next((value[key] for key in arguments if value.get(key) is not None), {})
    return named_call(value["name"], call_arguments)


def named_call(name: str, arguments: Any, *, id: str = "") -> ToolCall:
    """Return the call of ``name`` with ``arguments``: a JSON object or its text. None, ``null`` and no text are no arguments."""
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments) if arguments.strip() else None
        except (ValueError, RecursionError) as error:
            return unreadable_call(f"the arguments of {name} are not valid JSON: {error}", name)
    if arguments is None or arguments == "":
        return ToolCall(id, name, {})
    if not isinstance(arguments, Mapping):
        return unreadable_call(f"the arguments of {name} are not a JSON object", name)
    return ToolCall(id, name, arguments)


def open_ended_call(name: str, text: str, *, id: str = "") -> ToolCall:
    """Return the call of a format that does not mark a call's end: cut off if its arguments ``text`` are."""
    call = named_call(name, text, id=id)
    complete = bool(text) and (call.status is CallStatus.OK or text.endswith("}"))
    return call if complete else truncated_call("}", name)


MakeParser = Callable[[], CallParser]
