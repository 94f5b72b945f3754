"""Kimi K2 against the package ``renderers``, and what its parser reads."""

import json
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.model import RenderConfig
from agentrl.core.types import CallStatus, Fork, Message, ToolCall
from agentrl.render.formats.base import tool_schema
from agentrl.render.formats.kimi import KimiK2
from agentrl.render.registry import make_renderer
from tests.unit.render.conversations import TOOLS, added_ids, contents, look_up, well_formed, words
from tests.unit.render.oracles import Other, as_dicts
from tests.unit.render.tokenizers import MARKERS, family_tokenizer

KIMI = family_tokenizer("kimi-k2")
ASK, MORE = Message("user", "What is the capital of France?"), Message("user", "And of Spain?")
BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
OPEN, ARGUMENTS, CLOSE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
CALL = f'{BEGIN}{OPEN}functions.look_up:0{ARGUMENTS}{{"word": "Paris"}}{CLOSE}{END}'


@cache
def renderer_of(**config):
    return make_renderer(KIMI, RenderConfig(format="kimi-k2", **config))


def ids_of(text):
    """What an engine samples that says ``text``: markers are tokens."""
    return tuple(KIMI.encode(text, add_special_tokens=False))


class Wrapped(Other):
    """The other renderer with tools as Kimi's own tokenizer gives them to its template: as OpenAI's schemas."""

    def __init__(self):
        super().__init__(KIMI, "kimi-k2")

    def render(self, messages, tools=()):
        specs = [tool_schema(tool) for tool in tools] or None
        return tuple(self._renderer.render_ids(as_dicts(messages), tools=specs, add_generation_prompt=True))


# text


@given(well_formed(reasoning=True), st.booleans())
def test_tokens_are_those_of_another_renderer(conversation, keep):
    messages, tools = conversation
    assert renderer_of(keep_thinking=keep).render(messages, tools).token_ids == Wrapped().render(messages, tools)


def test_text():
    call = Message("assistant", "Let me see.", (ToolCall("functions.look_up:0", "look_up", {"word": "é"}),))
    message = Message("tool", "Paris", tool_call_id="functions.look_up:0")
    written = KimiK2().text((ASK, call, message), [look_up])
    assert written.startswith(
        '<|im_system|>tool_declare<|im_middle|>[{"function":{"description":"Look a word up.","name"'
    )
    assert written.partition("<|im_end|>")[2] == (
        "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>\n"
        "<|im_user|>user<|im_middle|>What is the capital of France?<|im_end|>"
        f"<|im_assistant|>assistant<|im_middle|>Let me see.{BEGIN}{OPEN}functions.look_up:0{ARGUMENTS}"
        f'{{"word": "é"}}{CLOSE}{END}<|im_end|>'
        "<|im_system|>tool<|im_middle|>## Return of functions.look_up:0\nParis<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>"
    )
    assert (
        KimiK2()
        .text((Message("system", "Be brief."), ASK), ())
        .startswith("<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>")
    )


def test_a_call_without_an_id_gets_its_number():
    calls = (ToolCall("", "look_up", {}), ToolCall("", "add", {}))
    written = KimiK2().text((ASK, Message("assistant", "", calls)), ())
    assert f"functions.look_up:0{ARGUMENTS}{{}}" in written
    assert f"functions.add:1{ARGUMENTS}{{}}" in written


# turns that follow


@given(
    st.lists(
        st.tuples(contents, st.booleans(), st.sampled_from(["user", "tool", "both"]), st.booleans()),
        min_size=1, max_size=4,
    )
)  # fmt: skip
def test_everything_goes_on_by_appending(played):
    renderer, wrapped, tools = renderer_of(), Wrapped(), (look_up,)
    messages, prompt = [ASK], renderer.render((ASK,), (look_up,)).token_ids
    for text, calls, kind, ended in played:
        sampled = renderer.encode(text) + (ids_of(CALL) if calls else ()) + (ids_of("<|im_end|>") if ended else ())
        message = renderer.parse(sampled, tools)
        messages.append(message)
        actual_message = Message("tool", "a city", tool_call_id="functions.look_up:0")
        new = {"user": (MORE,), "tool": (actual_message, actual_message), "both": (actual_message, MORE)}[kind]
        added = added_ids(renderer.bridge(messages, sampled, new, tools))
        assert not isinstance(added, Fork)
        if "<think>" not in text and "</think>" not in text:  # in K2 they are text as any other
            assert prompt + sampled + added == wrapped.bridge(prompt, sampled, new, tools)
        prompt += sampled + added
        messages.extend(new)
        if not any(marker in text for marker in MARKERS):
            assert renderer.decode(prompt) == renderer.decode(renderer.render(messages, tools).token_ids)


def test_end_tokens():
    renderer = renderer_of()
    assert [renderer.decode([index]) for index in renderer.end_token_ids] == ["<|im_end|>", "[EOS]"]


def test_the_policys_id_names_the_result():
    renderer = renderer_of()
    sampled = ids_of(CALL.replace(":0", ":7"))
    message = renderer.parse(sampled, [look_up])
    assert [call.id for call in message.tool_calls] == ["functions.look_up:7"]
    added = added_ids(
        renderer.bridge((ASK, message), sampled, (Message("tool", "x", tool_call_id=message.tool_calls[0].id),))
    )
    assert renderer.decode(added) == (
        "<|im_end|><|im_system|>tool<|im_middle|>## Return of functions.look_up:7\nx<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>"
    )


def test_an_id_cannot_hold_special_tokens():
    renderer = renderer_of()
    spelt = tuple(index for letter in "functions.<|im_end|>:0" for index in renderer.encode(letter))
    sampled = ids_of(BEGIN + OPEN) + spelt + ids_of(f"{ARGUMENTS}{{}}{CLOSE}{END}")
    message = renderer.parse(sampled)
    new = (Message("tool", "x", tool_call_id=message.tool_calls[0].id),)
    added = added_ids(renderer.bridge((ASK, message), sampled, new))
    assert added.count(renderer.end_token_id) == 2
    rendered_again = renderer.render((ASK, replace(message, token_ids=(), content=""), *new)).token_ids
    assert rendered_again.count(renderer.end_token_id) == 4  # system, user, assistant, tool


# parser


_free = st.text("ab c019é你.-+\n\t\\/<>{}[]\":,'", max_size=12)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _free,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_free, inner, max_size=3),
    max_leaves=5,
)
_calls = st.lists(st.tuples(st.sampled_from(["look_up", "add", "a.b-c"]), st.dictionaries(_free, _json, max_size=3)),
                  min_size=1, max_size=3)  # fmt: skip


def written(calls):
    """Calls as the format writes them."""
    made = tuple(ToolCall("", name, arguments) for name, arguments in calls)
    text = KimiK2().text((Message("system", ""), Message("assistant", "", made)), (), opener=False)
    return text[text.index(BEGIN) : text.index(END) + len(END)]


@given(_calls, words)
def test_calls_are_read_as_they_were_meant(calls, before):
    message = renderer_of().parse(ids_of(before + written(calls)))
    assert [(call.name, call.arguments) for call in message.tool_calls] == calls
    assert [call.id for call in message.tool_calls] == [f"functions.{name}:{at}" for at, (name, _) in enumerate(calls)]
    assert {call.status for call in message.tool_calls} == {CallStatus.OK}


@given(_calls, st.data())
def test_calls_that_are_cut_off_are_never_others(calls, data):
    ids = ids_of(written(calls))
    cut = ids[: data.draw(st.integers(0, len(ids) - 1))]
    full_token_ids = cut.count(*ids_of(CLOSE))
    read = renderer_of().parse(cut).tool_calls
    assert [(call.name, call.arguments) for call in read[:full_token_ids]] == calls[:full_token_ids]
    begun = bool(cut) and (cut.count(*ids_of(OPEN)) > full_token_ids or not full_token_ids)
    assert [call.status for call in read[full_token_ids:]] == [CallStatus.TRUNCATED] * begun


@given(st.lists(st.one_of(contents, st.sampled_from([CALL, *MARKERS])), max_size=6).map("".join), st.booleans())
def test_whatever_is_said_can_be_read(text, letters):
    ids = KIMI.encode(text, add_special_tokens=False, split_special_tokens=letters)
    for call in renderer_of().parse(ids, TOOLS).tool_calls:
        json.dumps(dict(call.arguments))
        assert bool(call.fault) == (call.status is not CallStatus.OK)


def test_a_call_spelt_letter_by_letter_is_no_call():
    renderer = renderer_of()
    spelt = tuple(index for letter in CALL for index in renderer.encode(letter))
    message = renderer.parse(spelt, [look_up])
    assert message.content == CALL
    assert message.tool_calls == ()
    assert len(renderer.parse(ids_of(CALL), [look_up]).tool_calls) == 1


@pytest.mark.parametrize(
    ("body", "status", "fault", "id"),
    [
        (f"{OPEN}look_up{ARGUMENTS}{{}}{CLOSE}", CallStatus.INVALID_JSON, "'look_up', not one such as functions.", ""),
        (f"{OPEN}functions.add:1{{}}{CLOSE}", CallStatus.INVALID_JSON, "id 'functions.add:1{}', not one such", ""),
        (f"{OPEN}functions.add:1{CLOSE}", CallStatus.INVALID_JSON, f"has no {ARGUMENTS}", "functions.add:1"),
        (f"{OPEN} add:1 {ARGUMENTS}{{{CLOSE}", CallStatus.INVALID_JSON, "arguments of add are not valid JSON", "add:1"),
        (f"{OPEN}functions.add:1{ARGUMENTS}[]{CLOSE}", CallStatus.INVALID_JSON, "not a JSON object", "functions.add:1"),
        (f"{OPEN}functions.sub:1{ARGUMENTS}{{}}{CLOSE}", CallStatus.UNKNOWN_TOOL, "no tool 'sub'", "functions.sub:1"),
        (f"{OPEN}functions.add:1{ARGUMENTS}{{}}{CLOSE}", CallStatus.SCHEMA_VIOLATION, "add: 'a' is a", "functions.add:1"),
        (f"{OPEN}functions.add:1{ARGUMENTS}{{}}", CallStatus.TRUNCATED, f"it has no {CLOSE}", "functions.add:1"),
        (f"{OPEN}functions.ad", CallStatus.TRUNCATED, f"it has no {CLOSE}", ""),
        ("", CallStatus.TRUNCATED, f"it has no {END}", ""),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_call_is_said(body, status, fault, id):
    [call] = renderer_of().parse(ids_of(BEGIN + body), TOOLS).tool_calls
    assert call.status is status
    assert fault in call.fault
    assert call.id == id


def test_an_empty_section_calls_nothing():
    assert renderer_of().parse(ids_of(f"hm{BEGIN}{END}")).tool_calls == ()
