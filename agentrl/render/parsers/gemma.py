"""Gemma 4 and FunctionGemma: ``call:NAME{key:value,…}`` between two tokens, with strings between two others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from typing_extensions import override

from agentrl.core.tool import Tool
from agentrl.core.types import ToolCall
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

_CALLS = (("<|tool_call>", "<tool_call|>"), ("<start_function_call>", "<end_function_call>"))
_QUOTES = ('<|"|>', "<escape>")
_HEAD = re.compile(r"\s*call:([^\s{}:]+)\s*(?=\{)")
_UNOPENED = re.compile(r"\bcall:[^\s{}:]+\s*\{")
_WORDS = re.compile(r"[^\W\d][\w.$-]*|\W+|\d+")


class GemmaParser(CallParser):
    """Parser of the calls of Gemma 4 and of FunctionGemma::

        <|tool_call>call:NAME{word:<|"|>é<|"|>,count:3,flags:[true,null]}<tool_call|>

    Keys have no quotes. The turn ends with the call: the engine stops where the tool's response begins.
    """

    markers = (*_CALLS[0], *_CALLS[1], *_QUOTES)
    reasoning = (("<|channel>", "<channel|>"),)

    @override
    def calls(self, pieces: Sequence[Piece], tools: Sequence[Tool]) -> list[ToolCall]:
        pair = next(
            (pair for pair in _CALLS if any(piece.marker and piece.text in pair for piece in pieces)), _CALLS[0]
        )
        calls = [
            _call(body) if closed else truncated_call(pair[1], _name(body)) for body, closed in between(pieces, *pair)
        ]
        return calls + unopened_calls(pieces, *pair, _UNOPENED)


def _name(body: Sequence[Piece]) -> str:
    head = _HEAD.match(body[0].text) if body else None
    return head[1] if head else ""


def _call(body: Sequence[Piece]) -> ToolCall:
    name = _name(body)
    if not name:
        return unreadable_call(f"the call is not call:NAME{{…}} but {join_pieces(body)[:80]!r}")
    first, *arguments = body
    try:
        return named_call(name, "".join(_json([Piece(first.text[first.text.index("{") :]), *arguments])).strip())
    except ValueError as fault:
        return unreadable_call(f"{name}: {fault}", name)


def _json(pieces: Sequence[Piece]) -> Iterator[str]:
    """Iterate over the JSON text of arguments.

    Raises:
        ValueError: a string does not end.
    """
    at = 0
    while at < len(pieces):
        quote = pieces[at]
        if not quote.marker:
            yield from _quoted_keys(quote.text)
            at += 1
            continue
        end = next((index for index in range(at + 1, len(pieces)) if pieces[index] == quote), None)
        if end is None:
            raise ValueError(f"a string has no second {quote.text}")
        yield json.dumps(join_pieces(pieces[at + 1 : end]))
        at = end + 1


def _quoted_keys(text: str) -> Iterator[str]:
    words = _WORDS.findall(text)
    for index, word in enumerate(words):
        is_key = (word[0].isalpha() or word[0] == "_") and "".join(words[index + 1 : index + 2]).lstrip()[:1] == ":"
        yield json.dumps(word) if is_key else word
