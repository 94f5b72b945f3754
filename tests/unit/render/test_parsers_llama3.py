import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.types import CallStatus, ToolCall
from agentrl.render.parsers.base import Piece, split_markers
from agentrl.render.parsers.llama3 import Llama3Parser
from agentrl.render.parsers.pythonic import PythonicParser
from tests.unit.render.conversations import TOOLS, calls, contents

TAG = "<|python_tag|>"
PARSERS = [Llama3Parser(), PythonicParser()]


def read(parser, text, tools=TOOLS):
    return parser.calls(tuple(split_markers([text], parser.markers)), tools)


def python_call(call):
    """A call as Python has it; arguments get names that Python allows."""
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"


def python_arguments(call):
    return ToolCall("", call.name, {f"a{number}": value for number, value in enumerate(call.arguments.values())})


@st.composite
def json_texts(draw, call):
    """A call in one of the ways that models write it."""
    name, arguments = {"name": call.name}, {draw(st.sampled_from(["parameters", "arguments"])): dict(call.arguments)}
    value = draw(st.sampled_from([{**name, **arguments}, {**arguments, **name}]))
    value = draw(st.sampled_from([value, {"type": "function", **value}]))
    return json.dumps(value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 2])))


@st.composite
def turns(draw, style):
    """Calls, and a turn that makes them; the turn's text has no white space at its ends."""
    made = draw(st.lists(calls(), min_size=1, max_size=3))
    if style == "python":
        made = [python_arguments(call) for call in made]
        body = f"[{', '.join(map(python_call, made))}]"
        return made, draw(st.sampled_from([body, f"Let me see.\n{body}", f"<|python_start|>{body}<|python_end|>"]))
    body = draw(st.sampled_from(["; ", ";", "\n", "\n\n"])).join(draw(json_texts(call)) for call in made)
    return made, draw(st.sampled_from(["", TAG, "Let me see.\n", "```json\n"])) + body


@pytest.mark.parametrize(("parser", "style"), [(PARSERS[0], "json"), (PARSERS[1], "python")])
@given(data=st.data())
def test_calls_come_back_as_they_were_made(parser, style, data):
    made, text = data.draw(turns(style))
    assert read(parser, text) == made


@pytest.mark.parametrize(("parser", "style"), [(PARSERS[0], "json"), (PARSERS[1], "python")])
@given(data=st.data())
def test_a_turn_that_is_cut_off_makes_no_other_calls(parser, style, data):
    """The calls that were whole before the cut, then at most one, which says that it is cut off."""
    made, text = data.draw(turns(style))
    cut = text[: data.draw(st.integers(0, len(text) - 1))]
    actual = read(parser, cut)
    full_calls = [call for call in actual if call.status is CallStatus.OK]
    assert full_calls == made[: len(full_calls)]
    assert actual[len(full_calls) :] == [call for call in actual if call.status is CallStatus.TRUNCATED]
    assert len(actual) - len(full_calls) <= 1
    if style == "python" and "<|python_start|>" not in text:
        assert not full_calls, "a list is one statement"


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (PARSERS[0], '{"name": "add", "parameters": {"a": 1.5, "b": true}}'),
        (PARSERS[0], '{"type": "function", "name": "add", "parameters": {"a": "}"}}'),
        (PARSERS[0], '{"parameters": {"a": "\\\\"}, "name": "add"}'),
        (PARSERS[0], f'{TAG}{{"name": "add", "parameters": {{}}}}'),
        (PARSERS[0], f'{TAG}add.call(a="1")'),
        (PARSERS[1], """[add(a=1, b="]"), look_up(word='"')]"""),
        (PARSERS[1], '[look_up(word="""a"b\n]""")]'),
        (PARSERS[1], "<|python_start|>add(a=-1)"),
    ],
)
def test_a_call_is_seen_to_be_cut_off_wherever_that_is(parser, text):
    """From the first token that shows the call on."""
    assert {call.status for call in read(parser, text)} == {CallStatus.OK}
    shown = text.find("|>") + 2 if text.startswith("<|") else 1
    for cut in range(shown, len(text)):
        assert [call.status for call in read(parser, text[:cut])] == [CallStatus.TRUNCATED], text[:cut]


@pytest.mark.parametrize("parser", PARSERS)
@given(data=st.data(), offered=st.sampled_from([(), TOOLS]))
def test_anything_can_be_read(parser, data, offered):
    """Text and markers in any order."""
    markup = [
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        '"',
        "'",
        "\n",
        "\\",
        ";",
        '{"name":',
        '"parameters":',
        "f(",
        "a=",
        ".call(",
    ]
    pieces = st.one_of(
        st.builds(Piece, st.one_of(contents, st.sampled_from(markup))),
        st.builds(Piece, st.sampled_from(parser.markers), st.just(True)),
        st.one_of(turns("json"), turns("python")).map(lambda made: Piece(made[1])),
    )
    for call in parser.calls(data.draw(st.lists(pieces, max_size=8)), offered):
        assert call.status is CallStatus.OK or call.fault
        assert isinstance(call.name, str)
        assert isinstance(call.arguments, Mapping)


@pytest.mark.parametrize(
    "text",
    [
        '{"answer": 42}',
        '{"name": "Paris", "country": "France"}',
        '{"name": ["add"], "country": "France"}',
        '{"parameters": {"a": 1}}',
        '{"answers": [\n{"name": "add", "parameters": {}}\n]}',
        'In a line: {"name": "add", "parameters": {}}',
        '{"answer": {"name": "add", "par',
        "{not JSON} at all",
        "[1, 2, 3]",
        '["add(a=1)"]',
        "[link](https://example.com)",
        "as in [add(a=1)]",
        "",
    ],
)
@pytest.mark.parametrize("parser", PARSERS)
def test_what_is_no_call(parser, text):
    assert read(parser, text) == []


def test_the_name_of_a_tool_alone_is_a_call():
    assert read(PARSERS[0], '{"name": "add"}') == [ToolCall("", "add")]
    assert read(PARSERS[0], '{"name": "add"}', ()) == []


def test_a_marker_that_the_tokenizer_has_is_not_one_letter_by_letter():
    call = '{"name": "add", "parameters": {}}'
    assert PARSERS[0].calls([Piece(f"{TAG}{call}")], TOOLS) == []
    assert PARSERS[0].calls([Piece(TAG, marker=True), Piece(call)], TOOLS) == [ToolCall("", "add")]


def test_a_marker_within_an_argument_is_part_of_it():
    """Whether the policy said it by its token or by letters: nothing else can be meant there."""
    text = f'{{"name": "add", "parameters": {{"a": "{TAG}"}}}}'
    assert read(PARSERS[0], text + TAG + text) == [ToolCall("", "add", {"a": TAG})] * 2
    start = "<|python_start|>"
    assert read(PARSERS[1], f"[add(a='{start}')]") == [ToolCall("", "add", {"a": start})]
    assert read(PARSERS[1], f"{start}[add(a='{start}')]<|python_end|>") == [ToolCall("", "add", {"a": start})]


def test_what_follows_a_call_and_is_none():
    assert len(read(PARSERS[0], '{"name": "add", "parameters": {}} is {"name": "add", "parameters": {}}')) == 1
    assert len(read(PARSERS[0], f'{TAG}{{"name": "add"}}; {{"answer": 4}}\n{{"name": "add"}}')) == 2
    assert len(read(PARSERS[1], "[add(a=1)] and [add(b=2)]\n[add()]")) == 2


@pytest.mark.parametrize(
    ("parser", "text", "fault"),
    [
        (PARSERS[0], "{'name': 'add', 'parameters': {}}", "not valid JSON: Expecting property name"),
        (PARSERS[0], '{"name": "add", "parameters": {"a": 1,}}', "not valid JSON"),
        (PARSERS[0], '{"name": "add", "parameters": ' + "[" * 50_000 + "]" * 50_000 + "}", "recursion"),
        (PARSERS[0], '{"name": 3, "parameters": {}}', 'not a JSON object with a "name"'),
        (PARSERS[0], '{"name": "add", "parameters": [1]}', "arguments of add are not a JSON object"),
        (PARSERS[0], f'{TAG}{{"answer": 4}}', 'not a JSON object with a "name"'),
        (PARSERS[0], f"{TAG}print(4)", f"what follows {TAG}"),
        (PARSERS[0], f"{TAG}add.call(4)", "not given by name"),
        (PARSERS[1], "[add(1, 2)]", "arguments of add are not given by name"),
        (PARSERS[1], "[add(**{})]", "arguments of add are not given by name"),
        (PARSERS[1], "[add(a=1, a=2)]", "argument 'a' of add is given twice"),
        (PARSERS[1], "[add(a=b)]", "argument 'a' of add is not a literal"),
        (PARSERS[1], "[add(a=open('x'))]", "argument 'a' of add is not a literal"),
        (PARSERS[1], "[add(a=1+1)]", "argument 'a' of add is not a literal"),
        (PARSERS[1], "[add(a=b'x')]", "argument 'a' of add is not a literal"),
        (PARSERS[1], "[add(a=1e999)]", "argument 'a' of add is not a literal"),
        (PARSERS[1], "[add(a={1: 2})]", "keys are not all strings"),
        (PARSERS[1], "[add(a={**{}})]", "keys are not all strings"),
        (PARSERS[1], "[add(a=1), 3]", "something else"),
        (PARSERS[1], "[add(a=1) for a in b]", "something else"),
        (PARSERS[1], "[add().more(a=1)]", "no name"),
        (PARSERS[1], "[add(a=)]", "cannot be read as Python"),
        (PARSERS[1], "[add(a=" + "9" * 5000 + ")]", "cannot be read as Python"),
        (PARSERS[1], "[add(a=" + "-" * 50_000 + "1)]", "nested too deeply"),
        (PARSERS[1], "[add(a=1" + "+1" * 50_000 + ")]", "nested too deeply"),
        (PARSERS[1], "<|python_start|>add(a b)<|python_end|>", "cannot be read as Python"),
        (PARSERS[1], "<|python_start|><|python_end|>", "not a list of calls"),
    ],
)
def test_what_cannot_be_read(parser, text, fault):
    last = read(parser, text)[-1]
    assert last.status is CallStatus.INVALID_JSON
    assert fault in last.fault


def test_python_literals_are_json():
    text = '[m.f(a=true, b=null, c=-1.5, d=(1, "x" "y"), e={"k": [False]}), g(a="\\d")]'
    assert read(PARSERS[1], text) == [
        ToolCall("", "m.f", {"a": True, "b": None, "c": -1.5, "d": [1, "xy"], "e": {"k": [False]}}),
        ToolCall("", "g", {"a": "\\d"}),
    ]


@pytest.mark.parametrize(
    "unit",
    [
        '{"name":\n',
        "[f(a=\n",
        "{\n",
        "[\n",
        '"',
        "'",
        '"""',
        "\\",
        "{}\n",
        "[f()]\n",
        "<|python_tag|>",
        "<|python_start|>x",
        " ",
        "[ \n",
    ],
)
@pytest.mark.parametrize("parser", PARSERS)
def test_long_turns_are_read_in_time_that_grows_with_their_length(parser, unit):
    """A hundred thousand characters; what takes the square of it would not come back."""
    read(parser, unit * (100_000 // len(unit)) + "\n[f(a=1)]\n{}")
