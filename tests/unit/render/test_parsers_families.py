"""What the parsers of every family read: calls as their families write them, malformed ones, hostile ones."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.model import RenderConfig
from agentrl.core.types import CallStatus, Message, ToolCall
from agentrl.render.parsers.base import reasoning_markers, split_markers, split_reasoning
from agentrl.render.parsers.registry import PARSERS
from agentrl.render.registry import make_renderer
from tests.unit.render.oracles import template
from tests.unit.render.test_parsers_glm import typed
from tests.unit.render.tokenizers import qwen_tokenizer
from tests.unit.test_hostile_text import CPU_S, cpu_s


def json_of(value):
    return json.dumps(value, ensure_ascii=False)


def plain(value):
    return value if isinstance(value, str) else json_of(value)


def invoke(prefix, calls, *, attribute=False):
    def parameter(key, value):
        kind = f' string="{str(isinstance(value, str)).lower()}"' if attribute else ""
        return f'<{prefix}parameter name="{key}"{kind}>{plain(value)}</{prefix}parameter>\n'

    return "\n".join(
        f'<{prefix}invoke name="{name}">\n'
        + "".join(parameter(*pair) for pair in arguments.items())
        + f"</{prefix}invoke>"
        for name, arguments in calls
    )


def gemma(value):
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return "{" + ",".join(f"{key}:{gemma(inner_value)}" for key, inner_value in value.items()) + "}"
        case list():
            return "[" + ",".join(map(gemma, value)) + "]"
    return json_of(value)


def hy3(name, arguments):
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n" for key, value in arguments.items()
    )
    text = f"<tool_call>{name}<tool_sep>\n{pairs}</tool_call>\n"
    return re.sub(r"<(/?(?:tool_call|tool_sep|arg_key|arg_value))>", r"<\1:opensource>", text)


def python(calls):
    return (
        "["
        + ", ".join(f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls)
        + "]"
    )


def listed(calls, name="name", arguments="arguments"):
    return json_of([{name: called, arguments: given} for called, given in calls])


WRITERS = {
    "harmony": lambda calls: "<|channel|>analysis<|message|>to=functions.no <|call|> or so<|end|>" + "".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json_of(given)}<|call|>"
        for name, given in calls
    ),
    "minimax": lambda calls: f"<minimax:tool_call>\n{invoke('', calls)}\n</minimax:tool_call>",
    "dsml": lambda calls: f"\n\n<｜DSML｜function_calls>\n{invoke('｜DSML｜', calls, attribute=True)}\n</｜DSML｜function_calls>",
    "dsml of V4": lambda calls: f"<｜DSML｜tool_calls>\n{invoke('｜DSML｜', calls, attribute=True)}\n</｜DSML｜tool_calls>",
    "step3": lambda calls: "<｜tool_calls_begin｜>" + "".join(
        f"<｜tool_call_begin｜>function<｜tool_sep｜>{invoke('steptml:', [call])}<｜tool_call_end｜>" for call in calls
    ) + "<｜tool_calls_end｜>",
    "atem": lambda calls: "".join(f"<atem:function_calls>\n{invoke('atem:', [call])}\n</atem:function_calls>" for call in calls),
    "mistral": lambda calls: "Well.[TOOL_CALLS]" + listed(calls),
    "mistral from 11": lambda calls: "".join(f"[TOOL_CALLS]{name}[CALL_ID]x[ARGS]{json_of(given)}" for name, given in calls),
    "gemma": lambda calls: "".join(f"<|tool_call>call:{name}{gemma(given)}<tool_call|>" for name, given in calls),
    "tool-code": lambda calls: f"So:\n```tool_code\n{python(calls)}\n```",
    "lfm2": lambda calls: f"<|tool_call_start|>{python(calls)}<|tool_call_end|>",
    "pythonic": lambda calls: f"<|python_start|>{python(calls)}<|python_end|>",
    "hunyuan": lambda calls: f"<tool_calls>{listed(calls)}</tool_calls>",
    "hunyuan hy3": lambda calls: "<tool_calls:opensource>\n" + "".join(hy3(*call) for call in calls) + "</tool_calls:opensource>",
    "cohere": lambda calls: f"<|START_ACTION|>{listed(calls, 'tool_name', 'parameters')}<|END_ACTION|>",
    "granite": lambda calls: f"<|tool_call|>{listed(calls)}",
}  # fmt: skip
"""By parser, and what follows it: calls as text, in the form that the family's models are trained on."""


def read(name, text, tools=()):
    """Return the calls in a text whose markers are plain characters."""
    parser = PARSERS[name]()
    reasoning = reasoning_markers(parser)
    markers = (*(marker for pair in reasoning for marker in pair), *parser.markers)
    _, pieces = split_reasoning(tuple(split_markers([text], markers)), opened=False, markers=reasoning)
    return parser.calls(pieces, tools)


_text = st.text("ab é你.-\n\"'\\{}[]<>:,/=", max_size=9)
_words = st.dictionaries(st.sampled_from("xyz"), _text | st.integers() | st.booleans(), max_size=2)
_arguments = st.fixed_dictionaries({}, optional={
    "text": _text, "count": st.integers(), "sure": st.booleans(), "items": st.lists(st.integers() | _text, max_size=3),
    "point": _words,
})  # fmt: skip


@pytest.mark.parametrize("name", WRITERS)
@given(calls=st.lists(st.tuples(st.just("typed"), _arguments), min_size=1, max_size=2))
def test_calls_are_read_as_their_family_writes_them(name, calls):
    actual = read(name.split()[0], WRITERS[name](calls), (typed,))
    assert [(call.name, call.arguments, call.status) for call in actual] == [(*call, CallStatus.OK) for call in calls]


OTHER_WRITERS = {
    "hermes": lambda calls: "".join(
        f'<tool_call>{json_of({"name": name, "arguments": given})}</tool_call>' for name, given in calls
    ),
    "qwen3-coder": lambda calls: "".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in given.items())
        + "</function>\n</tool_call>"
        for name, given in calls
    ),
    "glm": lambda calls: "".join(
        f"<tool_call>{name}"
        + "".join(f"<arg_key>{key}</arg_key><arg_value>{plain(value)}</arg_value>" for key, value in given.items())
        + "</tool_call>"
        for name, given in calls
    ),
    "kimi": lambda calls: "".join(
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{json_of(given)}<|tool_call_end|>"
        for at, (name, given) in enumerate(calls)
    ),
    "deepseek": lambda calls: "<｜tool▁calls▁begin｜>" + "".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json_of(given)}\n```<｜tool▁call▁end｜>"
        for name, given in calls
    ) + "<｜tool▁calls▁end｜>",
    "tags": lambda calls: "".join(f"<{name}>{json_of(given)}</{name}>" for name, given in calls),
}  # fmt: skip
OPENINGS = (
    "<tool_call>",
    "<|tool_call_begin|>",
    "<｜tool▁call▁begin｜>",
    "<minimax:tool_call>",
    "<｜DSML｜function_calls>",
    "<｜DSML｜tool_calls>",
    "<｜tool_call_begin｜>",
    "<atem:function_calls>",
    "<|tool_call>",
    "<|tool_call_start|>",
    "<|START_ACTION|>",
    "<tool_call:opensource>",
    "<tool_calls>",
    "<|python_start|>[",
    "```",
    "<typed>",
    "[TOOL_CALLS]",
)
"""Texts that start calls."""
UNMARKED = ("harmony", "granite", "mistral")
"""Writers of calls that nothing tells from text if they have no opening, or that need none."""


@pytest.mark.parametrize("name", [name for name in WRITERS | OTHER_WRITERS if name not in UNMARKED])
@pytest.mark.parametrize("before", ["", "Let me see. "])
def test_a_call_without_its_opening_is_reported(name, before):
    """Alone, and after a call that is complete."""
    parser, write = name.split()[0], (WRITERS | OTHER_WRITERS)[name]
    whole = write([("typed", {"text": "a", "count": 3})])
    opening = next(opening for opening in OPENINGS if opening in whole)
    for text in (before + whole.replace(opening, "", 1), whole + before + whole.replace(opening, "", 1)):
        statuses = [call.status for call in read(parser, text, (typed,))]
        assert statuses.count(CallStatus.OK) <= text.count(opening if opening != "```" else "```tool_code")
        assert set(statuses) - {CallStatus.OK}, text
    assert read(parser, before + "Nothing is called, neither f nor typed.", (typed,)) == []


NO_ARGUMENTS = {
    "hermes": '<tool_call>{"name": "f", "arguments": ~}</tool_call>',
    "llama3": '{"name": "f", "parameters": ~}',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n~\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi": "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>~<|tool_call_end|>",
    "harmony": "<|channel|>commentary to=functions.f<|message|>~",
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": ~}]',
    "mistral from 11": "[TOOL_CALLS]f[ARGS]~",
    "hunyuan": '<tool_calls>[{"name": "f", "arguments": ~}]</tool_calls>',
    "cohere": '<|START_ACTION|>[{"tool_name": "f", "parameters": ~}]<|END_ACTION|>',
    "granite": '<|tool_call|>[{"name": "f", "arguments": ~}]',
}


@pytest.mark.parametrize("name", NO_ARGUMENTS)
@pytest.mark.parametrize("arguments", ["null", '""', "{}"])
def test_null_and_empty_arguments_are_no_arguments(name, arguments):
    text = NO_ARGUMENTS[name].replace("~", arguments)
    [call] = read(name.split()[0], text)
    assert (call.name, call.arguments, call.status) == ("f", {}, CallStatus.OK)


@pytest.mark.parametrize("name", WRITERS)
@given(data=st.data())
def test_a_cut_call_is_typed_or_not_yet_one(name, data):
    """However short a turn is cut, no call is read that the whole turn does not have."""
    full_markup = WRITERS[name]([("typed", {"text": 'a "b"', "count": 3})])
    cut = full_markup[: data.draw(st.integers(0, len(full_markup) - 1))]
    calls = read(name.split()[0], cut, (typed,))
    assert all(
        call.status in (CallStatus.TRUNCATED, CallStatus.INVALID_JSON)
        or call.arguments == {"text": 'a "b"', "count": 3}
        for call in calls
    )


@pytest.mark.parametrize(
    ("name", "text", "status", "fault"),
    [
        ("harmony", "<|channel|>commentary to=functions.f<|message|>{no}", CallStatus.INVALID_JSON, "arguments of f"),
        ("harmony", '<|channel|>commentary to=functions.f<|message|>{"a": ', CallStatus.TRUNCATED, "no }"),
        ("harmony", "<|start|>assistant to=functions.f", CallStatus.TRUNCATED, "no <|message|>"),
        ("minimax", "<minimax:tool_call>hm</minimax:tool_call>", CallStatus.INVALID_JSON, "no <invoke name"),
        ("minimax", '<minimax:tool_call><invoke name="f">x</invoke></minimax:tool_call>', CallStatus.INVALID_JSON, "stands"),
        ("minimax", '<minimax:tool_call><invoke name="f"><parameter name="a">1', CallStatus.TRUNCATED, "no </invoke>"),
        ("dsml", '<｜DSML｜tool_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">x</｜DSML｜parameter>'
         "</｜DSML｜invoke></｜DSML｜tool_calls>", CallStatus.INVALID_JSON, "argument a is not valid JSON"),
        ("dsml", "<｜DSML｜tool_calls>", CallStatus.TRUNCATED, "no </｜DSML｜"),
        ("step3", "<｜tool_call_begin｜>function<｜tool_sep｜><｜tool_call_end｜>", CallStatus.INVALID_JSON, "no <step"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{", CallStatus.TRUNCATED, "no }"),
        ("mistral", "[TOOL_CALLS]f", CallStatus.TRUNCATED, r"no \[ARGS\]"),
        ("mistral", "[TOOL_CALLS][ARGS]{}", CallStatus.INVALID_JSON, "names no function"),
        ("mistral", "[TOOL_CALLS][]", CallStatus.INVALID_JSON, "empty"),
        ("gemma", '<|tool_call>call:f{a:<|"|>b}<tool_call|>', CallStatus.INVALID_JSON, "no second"),
        ("gemma", "<|tool_call>call:f{a:b}<tool_call|>", CallStatus.INVALID_JSON, "arguments of f"),
        ("gemma", "<|tool_call>f{}<tool_call|>", CallStatus.INVALID_JSON, "is not call:NAME"),
        ("gemma", "<|tool_call>call:f{", CallStatus.TRUNCATED, r"no <tool_call\|>"),
        ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>", CallStatus.INVALID_JSON, "not given by name"),
        ("tool-code", "```tool_code\nf(", CallStatus.TRUNCATED, "no ```"),
        ("hunyuan", "<tool_calls>[{]</tool_calls>", CallStatus.INVALID_JSON, "not valid JSON"),
        ("hunyuan", "<tool_calls><tool_call>f<tool_sep><arg_key>a</tool_call>", CallStatus.INVALID_JSON, "arg_key"),
        ("cohere", '<|START_ACTION|>[{"parameters": {}}]<|END_ACTION|>', CallStatus.INVALID_JSON, '"name"'),
        ("cohere", '<|START_ACTION|>[{"tool_name": "f"', CallStatus.TRUNCATED, "END_ACTION"),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": 3}]', CallStatus.INVALID_JSON, "not a JSON object"),
        ("granite", '<|tool_call|>[{"name": "f"', CallStatus.TRUNCATED, r"no \]"),
    ],
)  # fmt: skip
def test_malformed_calls_are_typed(name, text, status, fault):
    [call] = read(name, text)
    assert call.status is status
    assert re.search(fault, call.fault)


@pytest.mark.parametrize(
    ("name", "thought"),
    [
        ("mistral", "[THINK]{}[/THINK]"),
        ("cohere", "<|START_THINKING|>{}<|END_THINKING|>"),
        ("gemma", "<|channel>thought\n{}<channel|>"),
        ("hunyuan hy3", "<think:opensource>{}</think:opensource>"),
        ("minimax", "<think>{}</think>"),
    ],
)
def test_a_call_within_reasoning_calls_nothing(name, thought):
    call, parser = WRITERS[name]([("f", {"a": "b"})]), name.split()[0]
    assert read(parser, thought.format(call)) == []
    assert read(parser, thought.format(call).removesuffix(thought.partition("{}")[2])) == []
    assert len(read(parser, thought.format(call) + call)) == 1


_PREFIXES = ("", "atem:", "steptml:", "｜DSML｜")
PIECES = sorted(
    {marker for make in PARSERS.values() for marker in (*make().markers, *sum(reasoning_markers(make()), ()))}
    | {*" \nx{}[]()\"':=,\\f1", "call:f", "to=functions.f"}
    | {"<function=f>", "<parameter=a>", "</parameter>", "</function>", "<f>", "</f>"}
    | {f"<{prefix}{rest}" for prefix in _PREFIXES for rest in ('invoke name="f">', 'parameter name="a">')}
    | {f"</{prefix}{rest}" for prefix in _PREFIXES for rest in ("invoke>", "parameter>")}
)
"""What calls are made of, in any family."""


@given(parts=st.lists(st.sampled_from(PIECES), max_size=24), name=st.sampled_from(sorted(PARSERS)))
@settings(max_examples=8 * settings.default.max_examples)  # of many families
def test_nothing_that_a_policy_says_raises(parts, name):
    for call in read(name, "".join(parts), (typed,)):
        assert call.status in (CallStatus.OK, CallStatus.INVALID_JSON, CallStatus.TRUNCATED)
        assert (call.status is CallStatus.OK) != bool(call.fault)


def openings(name):
    """Return the beginnings of calls of a parser, after which hostile text is read as part of a call."""
    full_writes = [
        write([("typed", {"text": "QQ", "count": 3})]) for key, write in WRITERS.items() if key.split()[0] == name
    ]
    return ["", *(text[:at] for text in full_writes for at in (text.index("typed"), text.index("QQ")))]


REPEATED = 18_000
"""Characters of a hostile text: where they take `CPU_S` if the time is quadratic, 64,000 take two seconds."""


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_hostile_repetitions_take_linear_time(name):
    """Anything that a call is made of, thousands of times, alone and within a call."""
    units = [*PARSERS[name]().markers[:8], " ", "\n", "x", "{", "[ ", "(", '"', "'", '\\"', "a b", "a:", "1", "<typed>"]
    units += [f'<{prefix}invoke name="f"><{prefix}parameter name="a">' for prefix in _PREFIXES[:3]]
    for opening in openings(name):
        for unit in units:
            text = opening + unit * (REPEATED // len(unit))
            assert cpu_s(lambda text: read(name, text, (typed,)), text) < CPU_S, (opening, unit)


TEMPLATES = {"gptoss": "harmony", "gemma4_v5": "gemma", "lfm2_2_5_v2": "lfm2", "muse_glimmer": "atem"}
"""Of those that ``trl`` ships, by the parser of their calls."""


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_parser_reads_what_the_familys_template_writes(name):
    calls = tuple(ToolCall(f"c{number}", "typed", {"text": "é", "count": 3}) for number in range(1))
    renderer = make_renderer(qwen_tokenizer(template(name)), RenderConfig())
    assert type(renderer.parser) is PARSERS[TEMPLATES[name]]
    message, answer = Message("user", "q"), Message("assistant", "", calls)
    text_before = renderer.decode(renderer.render((message,), (typed,)).token_ids)
    full_message = renderer.decode(
        renderer.render((message, answer, Message("tool", "r", tool_call_id="c0")), (typed,)).token_ids
    )
    assert full_message.startswith(text_before)
    actual_message = renderer.parse(renderer.encode(full_message[len(text_before) :]), (typed,)).tool_calls
    assert [(call.name, call.arguments, call.status) for call in actual_message[:1]] == [
        ("typed", {"text": "é", "count": 3}, CallStatus.OK)
    ]


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "spoken"),
    [
        ("a", False, "", "a"),
        ("<think>r</think>a", False, "<think>r", "a"),
        ("r</think>a", True, "r", "a"),
        ("r", True, "r", ""),
        ("a<think>r", False, "<think>r", "a"),
        ("<think>r</think>a<think>s", False, "<think>r<think>s", "a"),
    ],
)
def test_reasoning_is_split_from_what_is_spoken(text, opened, reasoning, spoken):
    parts = split_reasoning(tuple(split_markers([text], ("<think>", "</think>"))), opened=opened)
    assert tuple("".join(piece.text for piece in pieces) for pieces in parts) == (reasoning, spoken)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi.", ("hm", "Hi.")),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}",
            ("hm", ""),
        ),
        ("no channel", ("", "no channel")),
    ],
)
def test_harmony_writes_reasoning_and_text_in_channels(text, expected):
    parser = PARSERS["harmony"]()
    assert parser.split_text(tuple(split_markers([text], parser.markers))) == expected
