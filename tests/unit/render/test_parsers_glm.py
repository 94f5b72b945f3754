"""What the parsers of GLM-4 and GLM-4.5 read."""

import json
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.model import RenderConfig
from agentrl.core.tool import tool
from agentrl.core.types import CallStatus, Message, ToolCall
from agentrl.render.registry import FORMATS, make_renderer
from tests.unit.render.conversations import contents, look_up, words
from tests.unit.render.tokenizers import MARKERS, family_tokenizer

CALL = "<tool_call>look_up\n<arg_key>word</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"


@cache
def renderer_of(name="glm-4.5"):
    return make_renderer(family_tokenizer(name), RenderConfig(format=name))


def ids_of(text, name="glm-4.5"):
    """What an engine samples that says ``text``: tags and markers are tokens."""
    return tuple(family_tokenizer(name).encode(text, add_special_tokens=False))


@tool(timeout_s=1)
async def find(word: str) -> str:
    """Find a word."""
    return word


@tool(timeout_s=1, parameters={
    "type": "object",
    "$defs": {"point": {"type": "object"}, "loop": {"$ref": "#/$defs/loop"}},
    "properties": {
        "text": {"type": "string"}, "count": {"type": "integer"}, "share": {"type": "number"},
        "sure": {"type": "boolean"}, "items": {"type": "array"}, "point": {"$ref": "#/$defs/point"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "grade": {"enum": ["1", "2"]}, "level": {"const": 3},
        "loop": {"$ref": "#/$defs/loop"}, "any": {},
    },
})  # fmt: skip
async def typed(**_: object) -> str:
    """Take values of all types."""
    return ""


_free = st.text("ab c019é你.-+\n\t\\/<>{}[]\":,'", max_size=12)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _free,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_free, inner, max_size=3),
    max_leaves=5,
)
_objects = st.dictionaries(_free, _json, max_size=3)
arguments = st.fixed_dictionaries({}, optional={
    "text": _free, "count": st.integers(), "share": st.floats(allow_nan=False, allow_infinity=False),
    "sure": st.booleans(), "items": st.lists(_json, max_size=3), "point": _objects, "level": st.just(3),
    "maybe": st.none() | _free.filter(lambda text: text.strip() != "null"), "grade": st.sampled_from(["1", "2"]),
    "any": _json.filter(lambda value: not isinstance(value, str)),
})  # fmt: skip


def written(name, call):
    """A call as the format writes it, in tokens."""
    text = FORMATS[name](RenderConfig()).text((Message("assistant", "", (call,)),), (), opener=False)
    return text.partition("<|assistant|>" if name == "glm-4" else "</think>")[2]


@given(arguments, st.lists(words, max_size=1))
def test_calls_are_read_as_they_were_meant(given_arguments, before):
    renderer = renderer_of()
    call = ToolCall("", "typed", given_arguments)
    text = "".join(before) + written("glm-4.5", call) * 2
    read = renderer.parse(renderer.encode(text), [typed]).tool_calls
    assert [(one.name, one.arguments, one.fault) for one in read] == [("typed", given_arguments, "")] * 2


@given(_objects)
def test_glm4_calls_are_read_as_they_were_meant(given_arguments):
    renderer = renderer_of("glm-4")
    text = written("glm-4", ToolCall("", "find", given_arguments))
    for markup_text in (text, f"\nLet me see.<|assistant|>{text}"):
        [call] = renderer.parse(ids_of(markup_text, "glm-4")).tool_calls
        assert (call.name, call.arguments, call.status) == ("find", given_arguments, CallStatus.OK)


@given(arguments, st.data())
def test_a_call_that_is_cut_off_is_never_another_call(given_arguments, data):
    renderer = renderer_of()
    ids = renderer.encode(written("glm-4.5", ToolCall("", "typed", given_arguments)))
    cut = data.draw(st.integers(0, len(ids) - 1))
    statuses = [call.status for call in renderer.parse(ids[:cut], [typed]).tool_calls]
    begun = renderer.encode("<tool_call>")[0] in ids[:cut]
    assert statuses == ([CallStatus.TRUNCATED] if begun else [])


@given(_objects, st.data())
def test_a_glm4_call_that_is_cut_off_is_never_another_call(given_arguments, data):
    renderer = renderer_of("glm-4")
    text = written("glm-4", ToolCall("", "find", given_arguments))
    cut = text[: data.draw(st.integers(0, len(text) - 1))]
    calls = renderer.parse(renderer.encode(cut), [find]).tool_calls
    assert all(call.status in (CallStatus.TRUNCATED, CallStatus.INVALID_JSON) for call in calls)
    assert bool(calls) == (cut.partition("\n")[0] == "find")


@given(
    st.lists(st.one_of(contents, st.sampled_from([CALL, "find\n{", *MARKERS])), max_size=6).map("".join), st.booleans()
)
def test_whatever_is_said_can_be_read(text, letters):
    for name, tools in (("glm-4.5", (typed, look_up)), ("glm-4", (find,))):
        ids = family_tokenizer(name).encode(text, add_special_tokens=False, split_special_tokens=letters)
        message = renderer_of(name).parse(ids, tools)
        assert message.token_ids == tuple(ids[:-1] if ids and ids[-1] in renderer_of(name).end_token_ids else ids)
        for call in message.tool_calls:
            json.dumps(dict(call.arguments))
            assert bool(call.fault) == (call.status is not CallStatus.OK)


def test_a_call_spelt_letter_by_letter_is_no_call():
    renderer = renderer_of()
    spelt = tuple(index for letter in CALL for index in renderer.encode(letter))
    message = renderer.parse(spelt, [look_up])
    assert message.content == CALL
    assert message.tool_calls == ()
    assert len(renderer.parse(renderer.encode(CALL), [look_up]).tool_calls) == 1


OPEN_VALUE = "<tool_call>typed\n<arg_key>count</arg_key>\n<arg_value>"


@pytest.mark.parametrize(
    ("text", "status", "fault"),
    [
        ("<tool_call></tool_call>", CallStatus.INVALID_JSON, "the call names no function after <tool_call>"),
        ("<tool_call>nothing</tool_call>", CallStatus.UNKNOWN_TOOL, "there is no tool 'nothing'; there are: typed"),
        ("<tool_call>typed\n<arg_key>text</tool_call>", CallStatus.INVALID_JSON, "</tool_call> where </arg_key> is due"),
        (
            "<tool_call>typed\n<arg_value>x</arg_value></tool_call>",
            CallStatus.INVALID_JSON,
            "the call has <arg_value> where <arg_key> is due",
        ),
        (f"{OPEN_VALUE}3</arg_value>\nand</tool_call>", CallStatus.INVALID_JSON, "the call has 'and' after </arg_value>"),
        (f"{OPEN_VALUE}three</arg_value></tool_call>", CallStatus.INVALID_JSON, "count of typed is not valid JSON: Expec"),
        (f"{OPEN_VALUE}{'[' * 100_000}</arg_value></tool_call>", CallStatus.INVALID_JSON, "count of typed is not valid"),
        (f"{OPEN_VALUE}3.5</arg_value></tool_call>", CallStatus.SCHEMA_VIOLATION, "3.5 is not of type 'integer'"),
        (f'{OPEN_VALUE}"3"</arg_value></tool_call>', CallStatus.SCHEMA_VIOLATION, "'3' is not of type 'integer'"),
        (f"{OPEN_VALUE}3<tool_call>typed", CallStatus.TRUNCATED, "the call is cut off: it has no </tool_call>"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_call_is_said(text, status, fault):
    renderer = renderer_of()
    call = renderer.parse(renderer.encode(text), [typed]).tool_calls[0]
    assert call.status is status
    assert fault in call.fault


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "3", "3"), ("text", ' "a"\n', ' "a"\n'), ("count", " 3\n", 3), ("maybe", "null", None),
        ("maybe", "3", "3"), ("any", "3", 3), ("any", '"3"', '"3"'), ("any", "{3", "{3"), ("grade", "1", "1"),
        ("unheard", "[1]", [1]),
    ],
)  # fmt: skip
def test_the_schema_says_what_a_value_is(key, text, value):
    renderer = renderer_of()
    markup = f"<tool_call>typed\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    assert [call.arguments for call in renderer.parse(ids_of(markup), [typed]).tool_calls] == [{key: value}]


def test_a_schema_that_refers_to_itself_says_nothing():
    renderer = renderer_of()
    markup = "<tool_call>typed\n<arg_key>loop</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
    [call] = renderer.parse(ids_of(markup), [typed]).tool_calls
    assert (call.arguments, call.status) == ({"loop": 3}, CallStatus.SCHEMA_VIOLATION)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("\nParis is\nthe capital", None), ("Paris", None), ("\n{}", None), ("a b\n{}", None), ("Paris\nyes", None),
        ("find", CallStatus.TRUNCATED), ("find\n", CallStatus.TRUNCATED), ('find\n{"word": "a', CallStatus.TRUNCATED),
        ("find\n{word}", CallStatus.INVALID_JSON), ("seek\n{}", CallStatus.UNKNOWN_TOOL), ('find\n{"word": "a"}', CallStatus.OK),
        ('find\n{"word": 3}', CallStatus.SCHEMA_VIOLATION), ("find\n[]", CallStatus.TRUNCATED),
    ],
)  # fmt: skip
def test_glm4_parts_that_are_calls(text, status):
    renderer = renderer_of("glm-4")
    calls = renderer.parse(ids_of(f"{text}<|observation|>", "glm-4"), [find]).tool_calls
    assert [call.status for call in calls] == ([] if status is None else [status])


def test_reasoning_calls_nothing():
    renderer = renderer_of()
    assert renderer.parse(renderer.encode(f"\n<think>{CALL}</think>")).tool_calls == ()
    assert renderer.parse(renderer.encode(f"\n<think>{CALL}")).tool_calls == ()
    assert len(renderer.parse(renderer.encode(f"\n<think>{CALL}</think>\n{CALL}")).tool_calls) == 1
