"""The chat formats of the Qwen family against trl's templates, the real tokenizer and another implementation."""

from functools import cache

import pytest
import tiktoken
from hypothesis import assume, given
from hypothesis import strategies as st

from agentrl.config.model import RenderConfig
from agentrl.core.types import CallStatus, Fork, ForkReason, Message, ToolCall
from agentrl.render.registry import FORMATS, make_renderer
from tests.unit.render import tokenizers
from tests.unit.render.conversations import TOOLS, added_ids, contents, hermes, thought, turns_of, well_formed, words
from tests.unit.render.oracles import Other, template, template_text
from tests.unit.render.tokenizers import family_tokenizer, qwen_tokenizer

ASK, MORE, FOUND = Message("user", "Why?"), Message("user", "And?"), Message("tool", "4", tool_call_id="c")
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "x"}}\n</tool_call>'


@cache
def tiktokens():
    return tiktoken.Encoding("qwen", pat_str=tokenizers.SPLIT, mergeable_ranks=tokenizers.ranks(), special_tokens={})


@cache
def other():
    return Other(qwen_tokenizer(), "qwen3")


def make(**options):
    return make_renderer(qwen_tokenizer(), RenderConfig(**options))


def drive(renderer, first, *turns, tools=()):
    """What becomes of a conversation: a list of bridges and forks, and the text of the last prompt."""
    history, made = list(first), []
    prompt = renderer.render(history, tools).token_ids
    for text, new in turns:
        ids = (*renderer.encode(text), renderer.end_token_id)
        history.append(renderer.parse(ids, tools, prompt_ids=prompt))
        made.append(added_ids(renderer.bridge(history, ids, new, tools)))
        history += new
        if isinstance(made[-1], Fork):
            prompt = renderer.render(history, tools).token_ids
        else:
            prompt += ids + made[-1]
    return made, renderer.decode(prompt)


@given(text=st.text())
def test_the_tokenizer_is_qwens(text):
    """Encodes as ``tiktoken`` does with the published ranks, where no added token stands in the text."""
    made = qwen_tokenizer()
    assume(not any(token in text for token in made.get_added_vocab()))
    normal = made.backend_tokenizer.normalizer.normalize_str(text)
    assert made.encode(text) == tiktokens().encode(normal)
    assert made.decode(made.encode(text), clean_up_tokenization_spaces=False) == normal


def test_added_tokens_have_the_published_ids():
    made = qwen_tokenizer()
    published = {
        "<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<tool_call>": 151657,
        "</tool_call>": 151658, "<tool_response>": 151665, "<think>": 151667, "</think>": 151668,
    }  # fmt: skip
    assert {text: made.convert_tokens_to_ids(text) for text in published} == published
    special = {text for text, index in published.items() if made.added_tokens_decoder[index].special}
    assert special == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen2.5", {}),
        ("qwen3-instruct", {}),
        ("qwen3", {}),
        ("qwen3", {"thinking": False}),
    ],
)
@given(conversation=well_formed(reasoning=True, text=st.one_of(words, contents)))
def test_text_is_that_of_the_published_template(name, options, conversation):
    messages, tools = conversation
    format = FORMATS[name](RenderConfig(**options))
    variables = {} if options.get("thinking", True) else {"enable_thinking": False}
    tokenizer = family_tokenizer(name)
    expected = template_text(tokenizer, name, messages, tools, **variables)
    assert format.text(messages, tools) == expected
    expected = template_text(tokenizer, name, messages, tools, opener=False, **variables)
    assert format.text(messages, tools, opener=False) == expected


@given(conversation=well_formed(reasoning=True))
def test_ids_are_those_of_another_renderer(conversation):
    messages, tools = conversation
    assert make(format="qwen3").render(messages, tools).token_ids == other().render(messages, tools)


@given(conversation=well_formed(reasoning=True), end=st.booleans())
def test_bridges_are_those_of_another_renderer(conversation, end):
    """Where it bridges at all; it renders every turn of a user anew."""
    messages, tools = conversation
    renderer = make(format="qwen3")
    for index in turns_of(messages):
        following = [later for later in turns_of(messages) if later > index]
        new = messages[index + 1 : following[0] if following else len(messages)]
        answer_text = thought("re", messages[index].content) + "".join(map(hermes, messages[index].tool_calls))
        prompt, ids = other().render(messages[:index], tools), renderer.encode(answer_text)
        ids += (renderer.end_token_id,) if end else ()
        theirs = other().bridge(prompt, ids, new, tools)
        ours = added_ids(renderer.bridge((*messages[:index], renderer.parse(ids, tools)), ids, new, tools))
        if theirs is not None:
            assert prompt + ids + ours == theirs
        else:
            assert isinstance(ours, Fork), "a thought is left out"


def test_a_new_question_drops_earlier_reasoning_once():
    renderer = make(format="qwen3")
    made, text = drive(
        renderer,
        [ASK],
        (thought("r1", CALL), [FOUND]),
        (thought("r2", "a2"), [MORE]),
        ("a3", [MORE]),
        (thought("r4", CALL), [FOUND]),
        tools=TOOLS,
    )
    reasons = [fork.reason if isinstance(fork, Fork) else None for fork in made]
    assert reasons == [None, ForkReason.THINKING, None, None], "tools end no exchange; what is gone is gone"
    assert "r1" not in text
    assert "r2" not in text
    assert "<think>\nr4\n</think>" in text


def test_a_tools_result_in_a_users_turn_is_no_question():
    result = Message("user", "<tool_response>\n4\n</tool_response>")
    (added,), text = drive(make(format="qwen3"), [ASK], (thought("r1", CALL), [result]))
    assert not isinstance(added, Fork)
    assert "r1" in text


@pytest.mark.parametrize("new", [MORE, FOUND])
def test_keeping_thoughts_keeps_one_row(new):
    turns = [(thought("r1", "a1"), [new]), (thought("", "a2"), [MORE]), ("a3", [new])]
    made, text = drive(make(format="qwen3", keep_thinking=True), [ASK], *turns)
    assert not any(isinstance(added, Fork) for added in made)
    assert all(turn_text in text for turn_text, _ in turns)


def test_an_empty_thought_is_left_out_of_earlier_turns():
    """The template writes it in the last message alone."""
    (fork,), text = drive(make(format="qwen3"), [ASK], (thought("", CALL), [FOUND]), tools=TOOLS)
    assert fork == Fork(ForkReason.THINKING, "an empty thought is left out of earlier turns")
    assert "<think>" not in text.partition("Why?")[2]


def test_without_thinking_the_opener_holds_an_empty_thought():
    opener = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    renderer = make(format="qwen3", thinking=False)
    (fork,), text = drive(renderer, [ASK], ("a1", [MORE]))
    assert fork.reason is ForkReason.THINKING
    assert text.endswith(f"<|im_start|>assistant\na1<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n{opener}")
    keeping = make(format="qwen3", thinking=False, keep_thinking=True)
    (added,), text = drive(keeping, [ASK], ("a1", [MORE]))
    assert not isinstance(added, Fork)
    assert f"{opener}a1<|im_end|>\n" in text


def test_qwen3_thinking_opens_the_thought_itself():
    renderer = make(format="qwen3-thinking")
    assert renderer.decode(renderer.render([ASK]).token_ids).endswith("<|im_start|>assistant\n<think>\n")
    (first, second), text = drive(
        renderer, [ASK], (f"r1\n</think>\n\n{CALL}", [FOUND]), ("r2\n</think>\n\na2", [MORE]), tools=TOOLS
    )
    assert not isinstance(first, Fork)
    assert second.reason is ForkReason.THINKING
    assert "r1" not in text
    ids = renderer.encode(f"I could say {CALL} but\n</think>\n\n{CALL}")
    (call,) = renderer.parse(ids, TOOLS).tool_calls
    assert call.status is CallStatus.OK
    assert renderer.parse(renderer.encode(f"still thinking of {CALL}"), TOOLS).tool_calls == ()
    (unclosed,), _ = drive(renderer, [ASK], ("r1", [MORE]))
    assert "did not close it" in unclosed.detail


def test_auto_knows_qwen3_thinking_by_its_opener():
    published = template("qwen3")
    opened = published.replace(
        "'<|im_start|>assistant\\n' }}\n    {%- if enable", "'<|im_start|>assistant\\n<think>\\n' }}\n    {%- if enable"
    )
    assert opened != published
    assert make_renderer(qwen_tokenizer(opened)).format.name == "qwen3-thinking"
    switched = make_renderer(qwen_tokenizer(published), RenderConfig(thinking=False))
    assert switched.format.name == "qwen3"
    assert switched.decode(switched.render([ASK]).token_ids).endswith("</think>\n\n")
    kept_renderer = make_renderer(qwen_tokenizer(published), RenderConfig(keep_thinking=True))
    assert kept_renderer.format.name == "qwen3"
    assert drive(kept_renderer, [ASK], (thought("r1", "a1"), [MORE]))[1].count("r1") == 1


def test_arguments_nested_too_deeply_are_a_fault():
    deep = "[" * 400 + "]" * 400
    ids = make(format="qwen3").encode(f'<tool_call>{{"name": "look_up", "arguments": {{"word": {deep}}}}}</tool_call>')
    (call,) = make(format="qwen3").parse(ids, TOOLS).tool_calls
    assert call.status in (CallStatus.INVALID_JSON, CallStatus.SCHEMA_VIOLATION)
    assert call.fault


def test_calls_are_read_by_id():
    """A marker spelt letter by letter is no marker; what stands in the reasoning is no call."""
    renderer, tokenizer = make(format="qwen3"), qwen_tokenizer()
    spelt = tuple(index for word_part in CALL.split("_") for index in renderer.encode(word_part + "_"))
    assert renderer.parse(spelt, TOOLS).tool_calls == ()
    inside = tokenizer.encode(thought(CALL, CALL))
    assert [call.status for call in renderer.parse(inside, TOOLS).tool_calls] == [CallStatus.OK]


def test_half_a_character_in_a_call_can_be_answered():
    """JSON can spell a lone surrogate, which no tokenizer takes: it becomes a replacement character."""
    renderer = make(format="qwen3")
    ids = renderer.encode('<tool_call>\n{"name": "look_up", "arguments": {"word": "\\ud83d"}}\n</tool_call>')
    message = renderer.parse(ids, TOOLS)
    (call,) = message.tool_calls
    echo = call.arguments["word"]
    assert (call.status, echo) == (CallStatus.OK, "�")
    added = added_ids(renderer.bridge([ASK, message], ids, [Message("tool", "\ud83d", tool_call_id="c")], TOOLS))
    assert "<tool_response>\n�\n</tool_response>" in renderer.decode(added)


def test_a_turn_with_inline_text_is_one_turn():
    """What the policy says after inline text goes on with its turn, in a bridge and in a full render."""
    renderer = make(format="qwen3")
    turns = [("Look: x?", [Message("user", " [4] ", inline=True)]), ("so 4", [MORE])]
    history, prompt = [ASK], renderer.render([ASK]).token_ids
    for text, new in turns:
        ids = renderer.encode(text)
        history.append(renderer.parse(ids))
        prompt += ids + added_ids(renderer.bridge(history, ids, new))
        history += new
    turn_text = "assistant\nLook: x? [4] so 4<|im_end|>\n<|im_start|>user\nAnd?"
    assert turn_text in renderer.decode(prompt)
    assert renderer.decode(prompt) == renderer.decode(renderer.render(history).token_ids)
    thinking = added_ids(
        renderer.bridge(
            [ASK, Message("assistant", thought("r", "a")), *turns[0][1], Message("assistant", "b")], (65,), [MORE]
        )
    )
    assert thinking.reason is ForkReason.THINKING


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "qwen3-instruct"])
@pytest.mark.parametrize("content", ["", "as1", thought("re1", ""), thought("re1", "as1")])
def test_a_call_after_reasoning_is_written_as_the_template_writes_it(name: str, content: str) -> None:
    messages = (ASK, Message("assistant", content, (ToolCall("c", "look_up", {"word": "x"}),)))
    text = FORMATS[name](RenderConfig()).text(messages, TOOLS, opener=False)
    assert text == template_text(qwen_tokenizer(), name, messages, TOOLS, opener=False)
