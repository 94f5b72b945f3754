"""Lists of Python calls, which are parsed and never run: ``[f(a=1), g(b="x")]`` of Llama 3.2 and 4, LFM2 and Gemma 3."""

from __future__ import annotations

import ast
import math
import re
import warnings
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

from typing_extensions import override

from agentrl.core.tool import Tool
from agentrl.core.types import ToolCall
from agentrl.render.parsers.base import (
    CallParser,
    Piece,
    closed_calls,
    join_pieces,
    truncated_call,
    unopened_calls,
    unreadable_call,
)

_JSON = r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)'
_PYTHON = (
    r'"""(?:[^\\]|\\.)*?(?:"""|\\?\Z)'
    r"|'''(?:[^\\]|\\.)*?(?:'''|\\?\Z)"
    rf"|{_JSON}"
    r"|'(?:[^'\\]|\\.)*(?:'|\\?\Z)"
)
_BRACKET = r"|[\[({]|[\])}]"
JSON = re.compile(_JSON + _BRACKET, re.DOTALL)
"""Strings and brackets of JSON."""
PYTHON = re.compile(_PYTHON + _BRACKET, re.DOTALL)
"""Strings and brackets of Python."""


def closing(text: str, start: int, language: re.Pattern[str]) -> int | None:
    """Return the index after the bracket that closes the one at ``start``, or None if none does.

    Brackets in strings are ignored, and every kind of bracket closes every other. Linear in the text, without recursion.

    Args:
        text: text to scan.
        start: index of an opening bracket.
        language: `JSON` or `PYTHON`.
    """
    depth = 0
    for match in language.finditer(text, start):
        if match[0] in "[({":
            depth += 1
        elif match[0] in "])}":
            depth -= 1
            if depth == 0:
                return match.end()
    return None


def positions(pieces: Sequence[Piece], marker: str) -> list[int]:
    """Return the positions of a marker in the text of ``pieces``, in order."""
    starts: list[int] = []
    at = 0
    for piece in pieces:
        if piece.marker and piece.text == marker:
            starts.append(at)
        at += len(piece.text)
    return starts


def next_position(positions: Sequence[int], at: int, default: int) -> int:
    """Return the first of sorted positions from ``at`` on."""
    index = bisect_left(positions, at)
    return positions[index] if index < len(positions) else default


OPEN, CLOSE = "<|python_start|>", "<|python_end|>"

_LIST = re.compile(r"^[^\S\n]*(\[)(?=\s*(?:[^\W\d][\w.]*\s*(?:\(|\Z)|\Z))", re.MULTILINE)
"""A list at the start of a line whose first element is a call, complete or cut off at the end of the turn."""

_UNOPENED = re.compile(r"^(?![^\S\n]*\[).*\w\(", re.MULTILINE)
"""A call on a line that does not start with a list."""

_MARKED = re.compile(r"\s*(\[|[^\W\d][\w.]*\s*(?:\(|\Z)|\Z)")
"""A list or a call, complete or cut off at the end of the turn."""

_NAMES = {"true": True, "false": False, "null": None}
"""JSON's literals, which models mix with Python's."""

_UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Errors of `ast.parse`, including those for null bytes, numbers with too many digits, and too deep nesting."""


class PythonicParser(CallParser):
    """Parser of lists of calls, at the start of a line or between Llama 4's ``<|python_start|>`` and ``<|python_end|>``.

    Arguments are literals, given by name. An ordinary list is not a call.
    """

    markers = (OPEN, CLOSE)

    @override
    def calls(self, pieces: Sequence[Piece], tools: Sequence[Tool]) -> list[ToolCall]:
        calls = list(_read(join_pieces(pieces), positions(pieces, OPEN)))
        return calls + unopened_calls(pieces, OPEN, CLOSE, _UNOPENED)


def python_calls(source: str) -> list[ToolCall]:
    """Return the calls of a Python expression: a call, or a list of calls. Never raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as for an unknown escape sequence
            pieces = ast.parse(source, mode="eval").body
        elements = pieces.elts if isinstance(pieces, ast.List) else [pieces]
        return [_call(element) for element in elements]
    except _UNPARSABLE as error:
        return [unreadable_call(f"the call cannot be read as Python: {_reason(error)}")]


def _read(text: str, opens: Sequence[int]) -> Iterator[ToolCall]:
    """Iterate over the calls in text, with an `OPEN` at each of ``opens``; calls inside a list are part of it."""
    at = 0
    while True:
        marker = next_position(opens, at, len(text))
        opening = _LIST.search(text, at, marker)
        if opening is None and marker == len(text):
            return
        at = marker + len(OPEN)
        opening = opening or _MARKED.match(text, at)
        if opening is None:
            yield unreadable_call(f"what follows {OPEN} is not a list of calls")
            continue
        end = closing(text, opening.start(1), PYTHON)
        if end is None:  # the rest of the text is inside of it
            yield truncated_call("]")
            return
        yield from python_calls(text[opening.start(1) : end])
        at = end


def _call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call):
        return unreadable_call("a list of calls holds something else")
    name = _name(node.func)
    if not name:
        return unreadable_call("what is called has no name")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return unreadable_call(f"the arguments of {name} are not given by name", name)
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        assert keyword.arg is not None
        if keyword.arg in arguments:
            return unreadable_call(f"the argument {keyword.arg!r} of {name} is given twice", name)
        try:
            arguments[keyword.arg] = _literal(keyword.value)
        except ValueError as error:
            return unreadable_call(f"the argument {keyword.arg!r} of {name} is {error}", name)
    return ToolCall("", name, arguments)


def _name(node: ast.expr) -> str:
    """Return a dotted name such as ``a.b.c``; empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal as in JSON: tuples become lists.

    Raises:
        ValueError: it is not a literal, or not representable in JSON.
    """
    match node:
        case ast.Constant(value=str() | int() | None):
            return node.value
        case ast.Constant(value=float() as number) if math.isfinite(number):
            return number
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
            return -_literal(node.operand)
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_literal(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("not a literal that JSON knows")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a dictionary whose keys are not all strings")


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError | MemoryError):
        return "it is nested too deeply"
    return error.msg if isinstance(error, SyntaxError) else str(error)


class _PythonicBetweenMarkers(CallParser):
    markers: tuple[str, str]
    unopened = re.compile(r"\w\s*\(")
    """What a call without its opening has before its closing."""

    @override
    def calls(self, pieces: Sequence[Piece], tools: Sequence[Tool]) -> list[ToolCall]:
        return closed_calls(pieces, *self.markers, python_calls, self.unopened)


class Lfm2Parser(_PythonicBetweenMarkers):
    """Parser of the calls of LFM2: ``<|tool_call_start|>[f(a=1), g(b="x")]<|tool_call_end|>``."""

    markers = ("<|tool_call_start|>", "<|tool_call_end|>")


class ToolCodeParser(_PythonicBetweenMarkers):
    """Parser of calls in a code block ``tool_code``, as Gemma 3 is prompted to write them::

    ```tool_code
    f(a=1)
    ```
    """

    markers = ("```tool_code", "```")
    unopened = re.compile(r"^tool_code\b[^(]*\(", re.MULTILINE)
