"""Mistral: ``[TOOL_CALLS]``, then a name and its arguments, or a JSON list of calls."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from agentrl.core.tool import Tool
from agentrl.core.types import CallStatus, ToolCall
from agentrl.render.parsers.base import (
    CallParser,
    Piece,
    between,
    join_pieces,
    named_call,
    truncated_call,
    unopened_calls,
    unreadable_call,
)
from agentrl.render.parsers.json_lists import list_calls

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
    call = named_call(name, text, id=id)
    complete = bool(text) and (call.status is CallStatus.OK or text.endswith("}"))
    return [call if complete else truncated_call("}", name)]
