"""Granite, Command A, Hunyuan A13B and Mistral: a JSON list of calls, or after a marker a name and its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from agentrl.core.tool import Tool
from agentrl.core.types import CallStatus, ToolCall
from agentrl.render.parsers.base import (
    CALL_NAME,
    CallParser,
    Piece,
    between,
    closed_calls,
    join_pieces,
    named_call,
    open_ended_call,
    read_json,
    truncated_call,
    unopened_calls,
    unreadable_call,
)

_NAMES, _ARGUMENTS, _IDS = ("name", "tool_name"), ("arguments", "parameters"), ("id", "tool_call_id")


class GraniteParser(CallParser):
    """Parser of the calls of Granite 3: ``<|tool_call|>[{"name": …, "arguments": {…}}, …]`` up to the end of the turn."""

    markers = ("<|tool_call|>",)

    @override
    def calls(self, pieces: Sequence[Piece], tools: Sequence[Tool]) -> list[ToolCall]:
        return [call for body, _ in between(pieces, self.markers[0], "") for call in list_calls(join_pieces(body))]


class CohereParser(CallParser):
    """Parser of the calls of Command R7B and Command A::

    <|START_ACTION|>[{"tool_call_id": "0", "tool_name": NAME, "parameters": {…}}, …]<|END_ACTION|>
    """

    markers = ("<|START_ACTION|>", "<|END_ACTION|>")
    reasoning = (("<|START_THINKING|>", "<|END_THINKING|>"),)

    @override
    def calls(self, pieces: Sequence[Piece], tools: Sequence[Tool]) -> list[ToolCall]:
        return closed_calls(pieces, *self.markers, list_calls, CALL_NAME)


def list_calls(text: str) -> list[ToolCall]:
    """Return the calls of a JSON list, or of one JSON object. Never raises."""
    text = text.strip()
    try:
        value = read_json(text)
    except (ValueError, RecursionError) as error:
        complete = text.endswith(("]", "}"))
        return [unreadable_call(f"the calls are not valid JSON: {error}") if complete else truncated_call("]")]
    entries = value if isinstance(value, list) else [value]
    return [_call(entry) for entry in entries] or [unreadable_call("the list of calls is empty")]


def _call(entry: Any) -> ToolCall:
    name = _first(entry, _NAMES, "")
    if not isinstance(name, str) or not name:
        return unreadable_call('the call is not a JSON object with a "name"')
    id = _first(entry, _IDS, "")
    call = named_call(name, _first(entry, _ARGUMENTS, {}), id=str(id) if isinstance(id, str | int) else "")
    return call if call.status is CallStatus.OK else unreadable_call(call.fault, name)


def _first(entry: Any, keys: Sequence[str], default: Any) -> Any:
    return next((entry[key] for key in keys if key in entry), default) if isinstance(entry, dict) else default


OPEN, ARGUMENTS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralParser(CallParser):
    """Parser of the calls of Mistral's models: a list up to version 7 of the tokenizer, then one marker a call::

    [TOOL_CALLS][{"name": NAME, "arguments": {…}, "id": ID}, …]
    [TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{…}[TOOL_CALLS]…
    """

    markers = (OPEN, ARGUMENTS, ID)
    reasoning = (("[THINK]", "[/THINK]"),)

    @override
    def calls(self, pieces: Sequence[Piece], tools: Sequence[Tool]) -> list[ToolCall]:
        calls = [call for body, _ in between(pieces, OPEN, "") for call in _calls(body)]
        return calls + unopened_calls(pieces, OPEN, "", Piece(ARGUMENTS, marker=True), needs_closing=False)


def _calls(body: Sequence[Piece]) -> list[ToolCall]:
    if body and not body[0].marker and join_pieces(body).lstrip().startswith("["):
        return list_calls(join_pieces(body))
    marked = [index for index, piece in enumerate(body) if piece.marker]
    arguments = next((index for index in marked if body[index].text == ARGUMENTS), None)
    name = join_pieces(body[: marked[0]] if marked else body).strip()
    if arguments is None:
        return [truncated_call(ARGUMENTS, name if marked else "")]
    if not name:
        return [unreadable_call(f"the call names no function after {OPEN}")]
    text = join_pieces(body[arguments + 1 :]).strip()
    id = join_pieces(body[marked[0] + 1 : arguments]).strip()
    return [open_ended_call(name, text, id=id)]
