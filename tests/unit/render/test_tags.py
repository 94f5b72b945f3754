import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.model import RenderConfig
from agentrl.core.tool import Tool, tool
from agentrl.core.types import CallStatus, ToolCall
from agentrl.render.parsers.base import Piece
from agentrl.render.parsers.tags import TagsParser
from agentrl.render.registry import make_renderer
from tests.unit.render.tokenizers import qwen_tokenizer


@tool(timeout_s=1)
async def search(query: str) -> str:
    """Search."""
    return query


@tool(timeout_s=1)
async def run(code: str, seconds: float = 1.0) -> str:
    """Run code."""
    return code


@tool(timeout_s=1)
async def add(a: int, b: int) -> str:
    """Add."""
    return str(a + b)


@tool(timeout_s=1)
async def book(name: str, guests: int, tags: list[str] | None = None, note: str | int = "") -> str:
    """Book a table."""
    return name


@tool(timeout_s=1)
async def look() -> str:
    """Look around."""
    return ""


TOOLS = (search, run, add, book, look)


def parse(text: str, tools: tuple[Tool, ...] = TOOLS) -> list[ToolCall]:
    return TagsParser().calls([Piece(text)], tools)


def only(text: str) -> ToolCall:
    (call,) = parse(text)
    return call


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ('<add>{"a": 1, "b": 2}</add>', "add", {"a": 1, "b": 2}),
        ("<add><a>1</a><b>2</b></add>", "add", {"a": 1, "b": 2}),
        ("I add.\n<add>\n  <b> 2 </b>\n  <a>1</a>\n</add> Done.", "add", {"a": 1, "b": 2}),
        ("<search>capital of France</search>", "search", {"query": "capital of France"}),
        ("<search>\ncapital of France\n</search>", "search", {"query": "capital of France"}),
        ('<search>{"query": "x"}</search>', "search", {"query": "x"}),
        ("<search><query>x</query></search>", "search", {"query": "x"}),
        ("<search>{x: 1} in YAML</search>", "search", {"query": "{x: 1} in YAML"}),
        ("<search><b>bold</b> in HTML</search>", "search", {"query": "<b>bold</b> in HTML"}),
        ("<search>how to write <add> here</search>", "search", {"query": "how to write <add> here"}),
        ("<run>print({1: 2})</run>", "run", {"code": "print({1: 2})"}),
        ("<run><code>\n  print(1)\n</code><seconds>2.5</seconds></run>", "run", {"code": "  print(1)", "seconds": 2.5}),
        ("<run><seconds>1</seconds><code>x</code></run>", "run", {"code": "x", "seconds": 1}),
        ("<run><code>print('</code>')</code></run>", "run", {"code": "print('</code>')"}),
        ("<run>{1: 'a dict, and so code'}</run>", "run", {"code": "{1: 'a dict, and so code'}"}),
        ("<book><name>7</name><guests>7</guests></book>", "book", {"name": "7", "guests": 7}),
        ('<book><name>A</name><guests>1</guests><tags>["x"]</tags></book>', "book",
         {"name": "A", "guests": 1, "tags": ["x"]}),
        ("<book><name>A</name><guests>1</guests><note>late</note></book>", "book",
         {"name": "A", "guests": 1, "note": "late"}),
        ("<book><name>A</name><guests>1</guests><note>20</note></book>", "book",
         {"name": "A", "guests": 1, "note": 20}),
        ("<look></look>", "look", {}),
        ("<look>{}</look>", "look", {}),
    ],
)  # fmt: skip
def test_calls(text: str, name: str, arguments: Mapping[str, Any]) -> None:
    call = only(text)
    assert (call.status, call.fault) == (CallStatus.OK, "")
    assert (call.name, call.arguments) == (name, arguments)


@pytest.mark.parametrize(
    ("text", "name", "status", "fault"),
    [
        ("<search>capital of", "search", CallStatus.TRUNCATED, "</search>"),
        ("<add><a>1</a>", "add", CallStatus.TRUNCATED, "</add>"),
        ("<add>", "add", CallStatus.TRUNCATED, "</add>"),
        ('<add>{"a": 1, "b": }</add>', "add", CallStatus.INVALID_JSON, "not valid JSON"),
        ('<search>{"query": "x</search>', "search", CallStatus.INVALID_JSON, "not valid JSON"),
        ("<add>1 + 2</add>", "add", CallStatus.INVALID_JSON, "neither"),
        ("<add><a>one</a><b>2</b></add>", "add", CallStatus.INVALID_JSON, "parameter a"),
        ("<add><a>1</a><b>2</add>", "add", CallStatus.INVALID_JSON, "</b>"),
        ("<add><a>1</a><a>2</a></add>", "add", CallStatus.INVALID_JSON, "twice"),
        ("<add><a>1</a> and 2</add>", "add", CallStatus.INVALID_JSON, "</a>"),
        ("<add>[1, 2]</add>", "add", CallStatus.INVALID_JSON, "neither"),
    ],
)
def test_attempts_that_fail_say_why(text: str, name: str, status: CallStatus, fault: str) -> None:
    call = only(text)
    assert (call.name, call.status) == (name, status)
    assert fault in call.fault


def test_several_calls_come_in_order_and_an_open_one_does_not_hide_the_next() -> None:
    calls = parse("<search>a</search> <add>1 <search>b <search>c</search> <look></look>")
    assert [(call.name, call.status) for call in calls] == [
        ("search", CallStatus.OK),
        ("add", CallStatus.TRUNCATED),
        ("search", CallStatus.TRUNCATED),
        ("search", CallStatus.OK),
        ("look", CallStatus.OK),
    ]
    assert calls[3].arguments == {"query": "c"}


@pytest.mark.parametrize("text", ["", "no call", "<serch>x</serch>", "</search>", "<search query='x'>", "a < b > c"])
def test_what_names_no_offered_tool_is_text(text: str) -> None:
    assert parse(text) == []


def test_without_tools_there_are_no_calls() -> None:
    assert parse("<search>x</search>", ()) == []


def test_through_the_renderer_schemas_are_checked_and_reasoning_is_left_out() -> None:
    renderer = make_renderer(qwen_tokenizer(), RenderConfig(format="qwen3", tool_parser="tags"))

    def calls(text: str) -> list[tuple[str, CallStatus]]:
        message = renderer.parse((*renderer.encode(text), renderer.end_token_id), TOOLS)
        return [(call.name, call.status) for call in message.tool_calls]

    assert calls("<think>\n<search>x</search>\n</think>\n\n<look></look>") == [("look", CallStatus.OK)]
    assert calls("<add><a>1</a></add>") == [("add", CallStatus.SCHEMA_VIOLATION)]
    assert calls("<search></search>") == [("search", CallStatus.SCHEMA_VIOLATION)]
    assert calls("<tool_call><search>x</search></tool_call>") == [("search", CallStatus.OK)]


ALPHABET = ["<", ">", "</", "search", "query", "add", "a", "{", "}", '"a": 1', "[", "]", "\n", " ", "é", "1", ":", "\0"]
SOUP = st.lists(st.sampled_from(ALPHABET), max_size=30).map("".join)


@given(st.one_of(SOUP, st.text(max_size=40)), st.sampled_from(["", "<search>", "<add>", "<add><a>", "<book>"]))
def test_parsing_never_raises_and_every_opening_is_an_attempt(text: str, start: str) -> None:
    calls = parse(start + text)
    assert len(calls) >= (1 if start else 0)
    assert all(call.fault or call.status is CallStatus.OK for call in calls)


def test_depth_is_no_way_out() -> None:
    nested = "[" * 100_000 + "]" * 100_000
    assert only(f'<add>{{"a": {nested}}}</add>').status is CallStatus.INVALID_JSON
    assert only(f"<add><a>{nested}</a></add>").status is CallStatus.INVALID_JSON


@given(st.text(max_size=30), st.integers(), st.lists(st.text(max_size=5), max_size=3))
def test_values_come_back_as_they_were_given(name: str, guests: int, tags: list[str]) -> None:
    given_name = name.replace("<", "")
    body = f"<name>\n{given_name}\n</name><guests>{guests}</guests><tags>{json.dumps(tags)}</tags>"
    expected = {"name": given_name, "guests": guests, "tags": tags}
    assert only(f"<book>{body}</book>").arguments == expected
