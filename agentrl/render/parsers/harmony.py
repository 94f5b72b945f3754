"""gpt-oss (harmony): messages in channels, with a call's name in the header of its message."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from typing_extensions import override

from agentrl.core.tool import Tool
from agentrl.core.types import ToolCall
from agentrl.render.parsers.base import CallParser, Piece, join_pieces, open_ended_call, truncated_call

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_NAMESPACE = "functions."
_ANALYSIS = "analysis"


class HarmonyParser(CallParser):
    """Parser of the calls of gpt-oss::

        <|channel|>analysis<|message|>…<|end|>
        <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

    Messages of the channel ``analysis`` are the reasoning, which ends with its message. ``<|end|>`` ends a message, not the
    turn.
    """

    markers = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
    reasoning: tuple[tuple[str, str], ...] = ()

    @override
    def calls(self, pieces: Sequence[Piece], tools: Sequence[Tool]) -> list[ToolCall]:
        return [call for message in _messages(pieces) if (call := _call(message)) is not None]

    def split_text(self, pieces: Sequence[Piece]) -> tuple[str, str]:
        """Return the texts of the channel ``analysis``, and those of other channels that are not calls."""
        thoughts, texts = list[str](), list[str]()
        for message in _messages(pieces):
            if message.body is not None and _RECIPIENT.search(message.header) is None:
                (thoughts if _ANALYSIS in message.header else texts).append(message.body)
        return "\n".join(thoughts), "\n".join(texts) or (
            "" if any(piece.marker for piece in pieces) else join_pieces(pieces)
        )


class _Message(NamedTuple):
    header: str
    body: str | None
    """None if the message has no ``<|message|>``."""


def _messages(pieces: Sequence[Piece]) -> Iterator[_Message]:
    """Iterate over the messages of a turn; the first one starts with its channel."""
    header: list[Piece] = []
    body: list[Piece] | None = None
    started = False
    for piece in (*pieces, Piece(END, marker=True)):
        if piece.marker and piece.text in (START, END, CALL, RETURN):
            if started or body is not None or any(piece.marker for piece in header):  # anything else is text
                yield _Message(join_pieces(header), None if body is None else join_pieces(body))
            header, body, started = [], None, piece.text == START
        elif piece.marker and piece.text == MESSAGE and body is None:
            body = []
        else:
            (header if body is None else body).append(piece)


def _call(message: _Message) -> ToolCall | None:
    """Return the call of a message; None if it has no recipient."""
    recipient = _RECIPIENT.search(message.header)
    if recipient is None:
        return None
    name = recipient[1].removeprefix(_NAMESPACE)
    if message.body is None:
        return truncated_call(MESSAGE, name)
    return open_ended_call(name, message.body.strip())
