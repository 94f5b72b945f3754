"""A tool from a coroutine: with and without parentheses, and what its answer is for the policy."""

import asyncio
import dataclasses
import json
from datetime import date
from typing import Any

import pytest
from pydantic import BaseModel

from agentrl import Tool, ToolCall, ToolResult, ToolStatus, tool


def answer(value: Any) -> ToolResult:
    @tool(timeout_s=5)
    async def look_up() -> Any:
        return value

    return asyncio.run(look_up.run(ToolCall("c", "look_up")))


def test_a_bare_decorator_is_a_decorator_with_its_defaults() -> None:
    @tool
    async def add(a: int, b: int = 2) -> str:
        """Add two numbers."""
        return str(a + b)

    assert isinstance(add, Tool)
    assert (add.name, add.description, add.timeout_s) == ("add", "Add two numbers.", 30.0)
    assert add.parameters["required"] == ["a"]
    assert asyncio.run(add.run(ToolCall("c", "add", {"a": 1, "b": 5}))).content == "6"
    assert tool(add.function) == tool()(add.function) == add


def test_what_is_no_function_is_named() -> None:
    def plain(a: int) -> str:
        return str(a)

    async def generator(a: int) -> Any:
        yield a

    assert asyncio.run(tool(plain).run(ToolCall("c", "plain", {"a": 1}))).content == "1"
    with pytest.raises(TypeError, match=r"@tool wants a function .* generator yields"):
        tool(generator)
    with pytest.raises(TypeError, match=r"@tool wants a function, not 'add'"):
        tool("add")  # type: ignore[call-overload]


@dataclasses.dataclass
class Place:
    name: str
    since: date


class Model(BaseModel):
    name: str


@pytest.mark.parametrize(
    ("value", "content"),
    [
        ("as it is", "as it is"),
        ({"city": "Köln", "hills": [1, 2.5, None, True]}, '{"city": "Köln", "hills": [1, 2.5, null, true]}'),
        ([{"a": "it's"}], '[{"a": "it\'s"}]'),
        ((1, "x"), '[1, "x"]'),
        ({3: "x"}, '{"3": "x"}'),
        (7, "7"),
        (None, "null"),
        (Place("Köln", date(2020, 1, 2)), '{"name": "Köln", "since": "2020-01-02"}'),
        (Model(name="x"), '{"name": "x"}'),
    ],
)
def test_an_answer_reaches_the_policy_as_text_or_json(value: Any, content: str) -> None:
    result = answer(value)
    assert (result.status, result.content) == (ToolStatus.OK, content)
    if not isinstance(value, str):
        assert result.data == json.loads(content)


def test_an_answer_without_json_is_an_error_of_the_tool() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for value in (object(), {"a": object()}, loop, {"a": lambda: 1}):
        result = answer(value)
        assert result.status is ToolStatus.ERROR, value
        assert "look_up must return a str, a ToolResult or what JSON can say" in result.content
