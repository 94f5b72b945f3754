"""A tool from a coroutine: with and without parentheses, and what its answer is for the policy."""

import asyncio
import contextlib
import dataclasses
import enum
import functools
import itertools
import json
import math
import threading
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from typing import Annotated, Any, Literal, Unpack
from uuid import UUID

import pytest
from pydantic import BaseModel, ConfigDict, Field, computed_field
from pydantic_core import core_schema
from typing_extensions import TypedDict

from agentrl import Tool, ToolCall, ToolResult, ToolStatus, tool
from agentrl.core.background import run_in_daemon_thread
from agentrl.core.tool import validate_call
from agentrl.core.types import CallStatus
from agentrl.testing.virtual_time import run_virtual


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
    for seconds in (0, -1, 1e300, float("nan"), "5"):
        with pytest.raises(TypeError, match=r"@tool: timeout_s=.* is no number of seconds above 0, and at most 1e\+09"):
            tool(timeout_s=seconds)  # type: ignore[call-overload]
    for name in ("my tool", "", "<tool_call>", 5):
        with pytest.raises(TypeError, match=rf"@tool: the name {name!r} of plain must be letters, digits and _ "):
            tool(name=name)(plain)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"@tool: parameters='a' is no JSON Schema"):
        tool(parameters="a")  # type: ignore[call-overload]
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


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Address(BaseModel):
    model_config = ConfigDict(strict=True)
    street: str = Field(min_length=2)
    since: date | None = None


class Person(BaseModel):
    name: str
    homes: list[Address] = []


@dataclasses.dataclass
class Point:
    x: int
    y: float = 1.0


class Options(TypedDict, total=False):
    color: Color
    limit: int


class Even(int):
    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: Any) -> Any:
        return core_schema.no_info_after_validator_function(cls._check, core_schema.int_schema())

    @classmethod
    def _check(cls, number: int) -> int:
        if number == 4:
            raise KeyError("a validator's own fault")
        return number


Count = Annotated[int, Field(ge=1, le=5, description="how many")]
HOME = {"street": "Main", "since": "2020-01-02"}
AT_HOME = Address(street="Main", since=date(2020, 1, 2))

ARGUMENTS: list[tuple[Any, Any, Any, Any]] = [
    # annotation, argument that fits, what the function gets, argument that does not fit
    (int, 2.0, 2, 2.5),
    (int, 2, 2, True),
    (int, -(10**30), -(10**30), "1"),
    (float, 2, 2.0, "2"),
    (bool, True, True, 1),
    (str, "é", "é", 1),
    (Count, 5.0, 5, 6),
    (Annotated[str, Field(pattern="^a+$")], "aa", "aa", "b"),
    (Annotated[list[int], Field(min_length=1)], [1.0, 2], [1, 2], []),
    (Literal["a", "b"], "b", "b", "c"),
    (Literal[1, 2], 2, 2, 3),
    (Color, "red", Color.RED, "green"),
    (int | None, None, None, "x"),
    (Color | None, "blue", Color.BLUE, 3),
    (int | str, "1", "1", [1]),
    (list[Point], [{"x": 1}, {"x": 2.0, "y": 3}], [Point(1), Point(2, 3.0)], [{"y": 1}]),
    (dict[str, Point], {"a": {"x": 1}}, {"a": Point(1)}, {"a": 1}),
    (tuple[int, str], [1, "a"], (1, "a"), [1]),
    (set[int], [1, 2], {1, 2}, ["a"]),
    (Point, {"x": 1, "y": 2}, Point(1, 2.0), {"y": 2}),
    (Address, HOME, AT_HOME, {"street": "M"}),
    (Person, {"name": "Ann", "homes": [HOME]}, Person(name="Ann", homes=[AT_HOME]), {"homes": []}),
    (Person | None, {"name": "Ann"}, Person(name="Ann"), {}),
    (Options, {"color": "red", "limit": 1.0}, {"color": Color.RED, "limit": 1}, {"color": "pink"}),
    (date, "2020-01-02", date(2020, 1, 2), "2020-13-01"),
    (Decimal, "1.50", Decimal("1.50"), "one"),
    (UUID, "12345678123456781234567812345678", UUID(int=0x12345678123456781234567812345678), "x"),
    (Even, 2, 2, 4),
    (object, {"any": [1]}, {"any": [1]}, None),
    (Any, None, None, None),
]  # fmt: skip


@pytest.mark.parametrize("keyword", [False, True], ids=["parameter", "kwargs"])
@pytest.mark.parametrize(("hint", "fits", "value", "unfit"), ARGUMENTS)
def test_arguments_reach_the_function_as_the_types_it_names(
    hint: Any, fits: Any, value: Any, unfit: Any, keyword: bool
) -> None:
    received: list[Any] = []

    async def use(a: Any, b: int = 7) -> None:
        received.append((a, b))

    async def use_keywords(**others: Any) -> None:
        received.append((others["a"], 7))

    function = use_keywords if keyword else use
    function.__annotations__["others" if keyword else "a"] = hint
    made = tool(function)
    call = ToolCall("c", made.name, {"a": fits})
    assert validate_call(call, [made]).status is CallStatus.OK
    assert asyncio.run(made.run(call)).status is ToolStatus.OK
    ((argument, default),) = received
    assert (argument, type(argument), default) == (value, type(value), 7)
    if hint not in (Any, object):
        refused = validate_call(ToolCall("c", made.name, {"a": unfit}), [made])
        assert refused.status is CallStatus.SCHEMA_VIOLATION
        assert made.name in refused.fault
        assert "a" in refused.fault


def test_the_schema_is_that_of_the_signature() -> None:
    @tool
    async def order(who: Person, count: Count = 1, color: Color = Color.RED, **notes: int) -> None:
        """Order."""

    schema = dict(order.parameters)
    assert list(schema)[:3] == ["type", "properties", "required"]
    assert schema["required"] == ["who"]
    assert schema["properties"]["count"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 5,
        "default": 1,
        "description": "how many",
    }
    assert schema["properties"]["color"] == {"$ref": "#/$defs/Color", "default": "red"}
    assert schema["additionalProperties"] == {"type": "integer"}
    assert {"Person", "Address", "Color"} == schema["$defs"].keys()

    @tool
    async def add(a: int, b: int) -> None:
        """Add."""

    assert dict(add.parameters) == {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }


class Adder:
    """Adds."""

    def __call__(self, a: int, b: int = 2) -> int:
        """Add two numbers."""
        return a + b


def add_numbers(a: int, b: "int" = 2) -> "Nowhere":  # type: ignore[name-defined]  # noqa: F821
    """Add two numbers."""
    return a + b


@functools.wraps(add_numbers)
def wrapped(*numbers: Any, **names: Any) -> Any:
    return add_numbers(*numbers, **names)


@pytest.mark.parametrize(
    ("function", "name", "total"),
    [
        (add_numbers, "add_numbers", 3),
        (functools.partial(add_numbers, b=5), "add_numbers", 6),
        (functools.lru_cache(add_numbers), "add_numbers", 3),
        (wrapped, "add_numbers", 3),
        (Adder(), "Adder", 3),
    ],
    ids=["function", "partial", "cached", "wrapped", "object"],
)
def test_every_callable_has_the_schema_and_the_text_of_its_function(function: Any, name: str, total: int) -> None:
    made = tool(function)
    assert (made.name, made.description) == (name, "Add two numbers.")
    assert made.parameters["properties"]["b"] == {"type": "integer", "default": total - 1}
    assert asyncio.run(made.run(ToolCall("c", made.name, {"a": 1.0}))).content == str(total)


def test_defaults_that_json_cannot_say_are_those_of_the_function(recwarn: pytest.WarningsRecorder) -> None:
    @tool
    def defaults(
        a: int = Field(5, ge=1),
        b: float = math.inf,
        c: int = object(),  # type: ignore[assignment]
        d: int = None,  # type: ignore[assignment]  # noqa: RUF013
        e: Annotated[int | None, "how many"] = None,
    ) -> str:
        """Defaults."""
        return f"{a} {b} {type(c).__name__} {d} {e}"

    assert defaults.parameters["properties"] == {
        "a": {"type": "integer", "minimum": 1, "default": 5},
        "b": {"type": "number"},
        "c": {"type": "integer"},
        "d": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
        "e": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None, "description": "how many"},
    }
    assert not recwarn.list
    for arguments in ({}, {"d": None, "e": None}):
        call = validate_call(ToolCall("c", "defaults", arguments), [defaults])
        assert asyncio.run(defaults.run(call)).content == "5 inf object None None"


GOOGLE = """Look a word up.

    Slowly.

    Args:
        word: The word: any
            language.
        limit (int): How many.

    Returns:
        limit: The text.
    """
NUMPY = """Look a word up.

    Parameters
    ----------
    word : str
        The word: any
        language.
    limit : int, optional
        How many.

    Returns
    -------
    limit : str
        The text.
    """
SPHINX = """Look a word up.
    :param word: The word: any
        language.
    :param int limit: How many.
    :returns: The text.
    """


@pytest.mark.parametrize(
    "docstring", [GOOGLE, NUMPY, SPHINX, GOOGLE.replace("\n\n", "\n").replace("    Slowly.\n", "")]
)
def test_what_a_docstring_says_of_parameters_is_in_the_schema(docstring: str) -> None:
    def look_up(word: str, limit: Color = Color.RED, other: Annotated[int, Field(description="first")] = 1) -> str:
        return word

    look_up.__doc__ = f"{docstring}\n    :param other: second\n"
    made = tool(look_up)
    assert made.description == "Look a word up."
    descriptions = {name: schema.get("description") for name, schema in made.parameters["properties"].items()}
    assert descriptions == {"word": "The word: any language.", "limit": "How many.", "other": "first"}


class Marker(enum.Enum):
    END = object()


def test_a_result_has_a_text_and_a_status() -> None:
    result = answer(ToolResult("c", "ok", "yes"))  # type: ignore[arg-type]
    assert result == ToolResult("c", ToolStatus.OK, "yes")
    assert result.status is ToolStatus.OK
    for wrong in (ToolResult("c", ToolStatus.OK, 5), ToolResult("c", "fine", "yes")):  # type: ignore[arg-type]
        assert answer(wrong).status is ToolStatus.ERROR


def test_a_function_that_no_call_could_fit_is_refused() -> None:
    async def positional(a: int, /) -> None: ...
    async def several(*a: int) -> None: ...
    async def bare(a) -> None: ...  # type: ignore[no-untyped-def]
    async def unknown(a: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821
    async def callback(a: Callable[[int], int]) -> None: ...
    async def thread(a: threading.Thread) -> None: ...
    async def unpacked(**a: Unpack[Options]) -> None: ...
    async def marker(a: Marker) -> None: ...
    async def plain(a: int) -> None: ...

    for function in (positional, several, bare, unknown, callback, thread, unpacked, marker):
        with pytest.raises(TypeError, match=f"{function.__name__}: "):
            tool(function)
    schemas: list[dict[str, Any]] = [
        {"type": "nothing"},
        {"type": "array"},
        {"type": "object", "properties": {"b": {}}},
        {"type": "object", "properties": {}},
        {"type": "object", "properties": {"a": {}}, "required": ["b"], "additionalProperties": False},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}},
        {"type": "object", "properties": {"a": object()}},
    ]
    for schema in schemas:
        with pytest.raises(TypeError, match="plain: "):
            tool(parameters=schema)(plain)


def test_two_point_zero_is_two_where_a_schema_written_by_hand_has_an_integer() -> None:
    schema = {
        "type": "object",
        "properties": {
            "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "list": {"type": "array", "items": {"$ref": "#/$defs/count"}},
            "x": {"type": "number"},
            "free": {},
        },
        "$defs": {"count": {"type": "integer", "minimum": 0}},
    }
    call = ToolCall("c", "t", {"n": 2.0, "list": [1, 3.0, 2**70], "x": 2.0, "free": 2.0})
    arguments = Tool("t", "", schema).with_integers(call).arguments
    assert repr(arguments) == repr({"n": 2, "list": [1, 3, 2**70], "x": 2.0, "free": 2.0})
    assert call.arguments["n"] == 2.0


def test_the_time_limit_holds_and_an_error_of_time_is_the_tools() -> None:
    released = threading.Event()

    @tool(timeout_s=0.05)
    def plain() -> str:
        """Block."""
        released.wait()
        return "late"

    @tool(timeout_s=0.05)
    async def without_await() -> str:
        """Block."""
        released.wait()
        return "late"

    @tool(timeout_s=0.05)
    async def stubborn() -> str:
        """Go on."""
        while not released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
        return "late"

    @tool(timeout_s=0.02)
    async def blocking() -> str:
        """Block the event loop."""
        await asyncio.sleep(0)
        threading.Event().wait(0.05)
        return "late"

    @tool(timeout_s=5)
    async def own() -> str:
        """Fail."""
        raise TimeoutError("upstream")

    async def run() -> None:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.001)

        counting = asyncio.create_task(count())
        for slow in (plain, without_await):
            turns = 0
            assert (await slow.run(ToolCall("c", slow.name))).status is ToolStatus.TIMEOUT, slow.name
            assert turns > 5, "the event loop was blocked"
        assert (await blocking.run(ToolCall("c", "blocking"))).status is ToolStatus.TIMEOUT
        result = await own.run(ToolCall("c", "own"))
        assert (result.status, result.content) == (ToolStatus.ERROR, "TimeoutError: upstream")
        counting.cancel()
        released.set()

    asyncio.run(run())

    async def abandon() -> None:
        call = asyncio.create_task(stubborn.run(ToolCall("c", "stubborn")))
        assert (await call).status is ToolStatus.TIMEOUT
        released.set()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    released.clear()
    run_virtual(abandon())


def test_a_coroutine_that_ignores_its_cancellation_ends_with_its_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    @tool(timeout_s=0.01)
    async def stubborn() -> str:
        """Never end."""
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    monkeypatch.setattr("agentrl.core.user_code.END_S", 0.01)
    monkeypatch.setattr("agentrl.core.user_code.CLOSE_S", 0.05)
    run = run_in_daemon_thread(lambda: asyncio.run(stubborn.run(ToolCall("c", "stubborn", {}))), "stubborn")
    assert run.result(timeout=10).status is ToolStatus.TIMEOUT


def test_an_iterator_is_no_result() -> None:
    @tool
    def count() -> object:
        """Count."""
        return itertools.count()

    result = asyncio.run(count.run(ToolCall("c", "count", {})))
    assert result.status is ToolStatus.ERROR
    assert "count must return its result, such as a list, not the iterator count(0)" in result.content


def test_a_result_is_converted_to_json_in_the_thread() -> None:
    threads = []

    class Lazy(BaseModel):
        @computed_field
        def rows(self) -> int:
            threads.append(threading.current_thread())
            return 1

    @tool
    def rows() -> object:
        """Return rows."""
        return Lazy()

    assert asyncio.run(rows.run(ToolCall("c", "rows", {}))).data == {"rows": 1}
    assert threads
    assert threading.main_thread() not in threads


def test_an_error_without_a_message_is_an_error_of_the_tool(caplog: pytest.LogCaptureFixture) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    @tool
    def search() -> str:
        """Search."""
        raise Unprintable

    result = asyncio.run(search.run(ToolCall("c", "search", {})))
    assert result.status is ToolStatus.ERROR
    assert result.content == "Unprintable: (its message cannot be shown: __str__ raised RuntimeError)"
    assert result.content in caplog.text


def test_a_long_message_is_cut_in_the_log_and_whole_in_the_result(caplog: pytest.LogCaptureFixture) -> None:
    @tool
    def search() -> str:
        """Search."""
        raise ValueError("x" * 100_000)

    result = asyncio.run(search.run(ToolCall("c", "search", {})))
    assert result.content == "ValueError: " + "x" * 100_000
    assert "xxx… (100,000 characters)" in caplog.text
    assert len(caplog.text) < 3_000
