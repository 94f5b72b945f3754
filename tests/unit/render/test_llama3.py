import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError

from agentrl.config.model import RenderConfig
from agentrl.core.errors import ConversationError, ModelError
from agentrl.core.tool import tool, validate_call
from agentrl.core.types import CallStatus, Fork, ForkReason, Message, ToolCall
from agentrl.render.formats.llama3 import Llama3, Llama31, today
from agentrl.render.parsers.llama3 import Llama3Parser
from agentrl.render.parsers.pythonic import PythonicParser
from agentrl.render.registry import FORMATS, make_renderer
from tests.unit.render.conversations import TOOLS, added_ids, answers, contents, samples, well_formed, words
from tests.unit.render.oracles import Other, template, template_text
from tests.unit.render.tokenizers import family_tokenizer

DATE = "21 Nov 2026"
ASK = (Message("user", "How many lines?"),)
CALL = '{"name": "look_up", "parameters": {"word": "é"}}'


def renderer_of(name="llama3.1"):
    return make_renderer(family_tokenizer(name, template(name)))


def text_or_refusal(render):
    """What is written of a conversation, or None where it is refused, by whichever error."""
    try:
        return render()
    except (TemplateError, ValueError):
        return None


def on_one_day(made):
    """What ``made`` returns, with the date before and after it the same."""
    while True:
        day = today()
        result = made()
        if day == today():
            return result


@pytest.mark.parametrize(
    ("name", "format"),
    [("llama3", Llama3()), ("llama3.1", Llama31(date=DATE)), ("llama3.2", Llama31("llama3.2", date=DATE))],
)
@given(conversation=well_formed(text=contents), opener=st.booleans())
def test_text_is_what_the_published_template_says(name, format, conversation, opener):
    """With its refusals, such as of two calls in one message."""
    messages, tools = conversation
    tokenizer = family_tokenizer(name)
    expected = text_or_refusal(lambda: template_text(tokenizer, name, messages, tools, opener=opener, date_string=DATE))
    assert text_or_refusal(lambda: format.text(messages, tools, opener=opener)) == expected


@pytest.mark.parametrize("name", ["llama3", "llama3.1", "llama3.2"])
def test_auto_takes_the_format_of_the_template_and_its_date(name):
    """3.1 and 3.3 have a date of their own, 3.2 has that of the day."""
    chosen = on_one_day(lambda: renderer_of(name))
    assert chosen.format.name == name
    assert isinstance(chosen.parser, Llama3Parser)
    assert on_one_day(lambda: FORMATS[name](RenderConfig()).text(ASK, TOOLS)) == on_one_day(
        lambda: template_text(family_tokenizer(name), name, ASK, TOOLS)
    )


def test_the_date_stays_as_it_was_when_the_renderer_was_made(monkeypatch):
    renderer = renderer_of("llama3.2")
    text_before = renderer.render(ASK)
    monkeypatch.setattr("agentrl.render.formats.llama3.today", lambda: "01 Jan 1970")
    assert renderer.render(ASK) == text_before


@pytest.mark.parametrize(
    ("change", "parser"),
    [
        (lambda text: text.replace("December 2023", "December 2031"), Llama3Parser),
        (lambda text: "{# [func_name1(params_name1=params_value1)] #}" + text.replace("2023", "2031"), PythonicParser),
    ],
)
def test_a_changed_template_is_taken_itself_and_shows_its_parser(change, parser):
    renderer = make_renderer(family_tokenizer("llama3.1", change(template("llama3.1"))))
    assert renderer.format.name == "template"
    assert isinstance(renderer.parser, parser)
    assert "2031" in renderer.decode(renderer.render(ASK).token_ids)


def test_tools_stand_in_the_first_user_message_and_results_are_ipythons():
    """``system: environment, dates | user: tools, question | assistant: call | ipython: result as JSON | opener``."""
    renderer = renderer_of()
    messages = (*ASK, Message("assistant", "", (ToolCall("c", "look_up", {"word": "é"}),)),
                Message("tool", 'a "b"', tool_call_id="c"))  # fmt: skip
    text = renderer.decode(renderer.render(messages, TOOLS).token_ids)
    head, user, *other_messages = text.split("<|eot_id|>")
    assert head == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        "Environment: ipython\nCutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
    )
    assert user.startswith("<|start_header_id|>user<|end_header_id|>\n\nGiven the following functions")
    assert '"name": "look_up"' in user
    assert user.endswith("\n\nHow many lines?")
    assert other_messages == [
        f"<|start_header_id|>assistant<|end_header_id|>\n\n{CALL}",
        '<|start_header_id|>ipython<|end_header_id|>\n\n"a \\"b\\""',
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ((*ASK, Message("assistant", "", (ToolCall("", "add", {}), ToolCall("", "add", {})))), "may have one call"),
        ((Message("system", "Be brief."),), "first user message"),
        ((), "no message"),
    ],
)
def test_refusals(messages, reason):
    with pytest.raises(ConversationError, match=f"llama3.1.*{reason}"):
        renderer_of().render(messages, TOOLS)


@pytest.mark.parametrize("end", ["<|eot_id|>", "<|eom_id|>", None])
def test_either_end_token_stays_and_the_conversation_goes_on_behind_it(end):
    """``prompt | call <|eom_id|> (sampled) | <|start_header_id|> ipython …``; observed ``<|eot_id|>`` if none was."""
    renderer = renderer_of()
    sampled = renderer.encode(CALL)
    if end is not None:
        sampled += (renderer._encoder.special_ids[end],)
    message = renderer.parse(sampled, TOOLS)
    assert [call.status for call in message.tool_calls] == [CallStatus.OK]
    assert message.content == CALL
    added = added_ids(renderer.bridge((*ASK, message), sampled, (Message("tool", "<|eot_id|>"),), TOOLS))
    assert renderer.decode(added) == ("" if end else "<|eot_id|>") + (
        '<|start_header_id|>ipython<|end_header_id|>\n\n"<|eot_id|>"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert added.count(renderer.end_token_id) == (1 if end else 2), "what the tool says is text"


def test_the_end_of_the_text_ends_the_turn_and_is_no_place_to_go_on():
    renderer = renderer_of()
    sampled = (*renderer.encode("Done."), renderer._encoder.special_ids["<|end_of_text|>"])
    assert sampled[-1] in renderer.end_token_ids
    message = renderer.parse(sampled)
    assert message.content == "Done."
    fork = added_ids(renderer.bridge((*ASK, message), sampled, ASK))
    assert isinstance(fork, Fork)
    assert fork.reason is ForkReason.END_TOKEN
    assert "<|end_of_text|>" in fork.detail


def test_what_was_sampled_is_rendered_word_for_word_where_it_must_be_rendered_anew():
    """A call that its own way of writing survives: the template would have written it otherwise."""
    renderer = renderer_of()
    text = '<|python_tag|>{"parameters": {"word":"é"}, "name": "look_up"}; {"name": "add", "parameters": {}}'
    message = renderer.parse(renderer._encoder.template(text), TOOLS)
    assert [call.name for call in message.tool_calls] == ["look_up", "add"]
    again = renderer.render((*ASK, message, Message("tool", "3")), TOOLS).token_ids
    assert f"\n\n{text}<|eot_id|>" in renderer.decode(again)
    assert again.count(renderer._encoder.special_ids["<|python_tag|>"]) == 1


def test_a_tokenizer_without_the_end_token_is_refused(tokenizer):
    """Though it has another of those that may end a turn."""
    made = tokenizer("chatml")
    made.add_tokens(["<|end_of_text|>"], special_tokens=True)
    with pytest.raises(ModelError, match=r"no token '<\|eot_id\|>'.*llama3\.1; set render\.format"):
        make_renderer(made, RenderConfig(format="llama3.1"))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 10**400])
def test_numbers_that_a_schema_cannot_check(number):
    @tool(timeout_s=1, parameters={"type": "object", "properties": {"a": {"type": "number", "multipleOf": 0.5}}})
    async def halves(a: float) -> str:
        return str(a)

    call = validate_call(ToolCall("c", "halves", {"a": number}), [halves])
    assert call.status is CallStatus.SCHEMA_VIOLATION
    assert "number that cannot be checked" in call.fault


def test_half_a_character_in_what_a_tool_says_is_replaced():
    renderer = renderer_of()
    message = renderer.parse(renderer.encode(r'{"name": "look_up", "parameters": {"word": "\ud800"}}'), TOOLS)
    answer = Message("tool", str(message.tool_calls[0].arguments["word"]))
    for ids in (
        added_ids(renderer.bridge((*ASK, message), message.token_ids, (answer,))),
        renderer.render((*ASK, message, answer)).token_ids,
    ):
        assert '"\ufffd"<|eot_id|>' in renderer.decode(ids)


@given(conversation=well_formed())
def test_ids_are_those_of_another_renderer(conversation):
    messages, _ = conversation
    expected = Other(family_tokenizer("llama3.1"), "llama-3")
    messages = tuple(  # the template omits content next to a call
        Message(message.role, "" if message.tool_calls else message.content, message.tool_calls[:1])
        for message in messages
    )
    assert renderer_of().render(messages).token_ids == expected.render(messages)


@given(sample=samples, new=answers(True, inline=False, text=words), end=st.sampled_from(["<|eot_id|>", "<|eom_id|>"]))
def test_bridges_are_those_of_another_renderer(sample, new, end):
    renderer, tokenizer = renderer_of(), family_tokenizer("llama3.1")
    prompt = renderer.render(ASK)
    sampled = sample.ids(tokenizer, renderer._encoder.special_ids[end])
    message = renderer.parse(sampled)
    added = added_ids(renderer.bridge((*ASK, message), sampled, new))
    expected = Other(tokenizer, "llama-3").bridge(prompt.token_ids, sampled, new)
    if isinstance(added, Fork):
        assert added.reason is ForkReason.END_TOKEN
    else:
        assert prompt.token_ids + sampled + added == expected
