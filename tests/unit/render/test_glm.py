"""GLM-4 and GLM-4.5 against trl's template and the package ``renderers``."""

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agentrl.config.model import RenderConfig
from agentrl.core.tool import tool
from agentrl.core.types import Fork, ForkReason, Message, ToolCall
from agentrl.render.formats.glm import Glm4, Glm45
from agentrl.render.registry import choose_format, make_renderer
from tests.unit.render.conversations import added_ids, contents, look_up, well_formed, words
from tests.unit.render.oracles import Other, template, template_text
from tests.unit.render.tokenizers import family_tokenizer

GLM45 = family_tokenizer("glm-4.5", template("glm-4.5"))
GLM4 = family_tokenizer("glm-4")
ENDS = ("<|user|>", "<|observation|>", "<|endoftext|>")
ASK = Message("user", "What is the capital of France?")
FOUND = Message("tool", "Paris", tool_call_id="c1")
MORE = Message("user", "And of Spain?")
CALL = "<tool_call>look_up\n<arg_key>word</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"


def renderer_of(name="glm-4.5", **config):
    made = GLM45 if name == "glm-4.5" else GLM4
    return make_renderer(made, RenderConfig(format=name, **config))


def ids_of(renderer, text, end=""):
    """What an engine samples that says ``text`` and ends with the token ``end``: tags and markers are tokens."""
    made = GLM45 if renderer.format.name == "glm-4.5" else GLM4
    return tuple(made.encode(text + end, add_special_tokens=False))


def bridged(renderer, history, text, end, new, tools=()):
    """The text of the whole next prompt, or the fork."""
    sampled = ids_of(renderer, text, end)
    added = added_ids(renderer.bridge((*history, renderer.parse(sampled, tools)), sampled, new, tools))
    if isinstance(added, Fork):
        return added
    return renderer.decode(renderer.render(history, tools).token_ids + sampled + added)


# GLM-4.5: text


@given(well_formed(reasoning=True, text=contents), st.booleans(), st.booleans())
def test_text_is_what_the_template_writes(conversation, thinking, opener):
    messages, tools = conversation
    written = Glm45(thinking=thinking).text(messages, tools, opener=opener)
    assert written == template_text(GLM45, "glm-4.5", messages, tools, opener=opener, enable_thinking=thinking)


@given(well_formed(reasoning=True), st.booleans())
def test_tokens_are_those_of_another_renderer(conversation, thinking):
    messages, _ = conversation  # whose JSON schemas the other renderer takes in another form
    assume(all(len(message.tool_calls) < 2 for message in messages))  # it has no newline before a second call
    package_renderer = Other(GLM45, "glm-4.5", enable_thinking=thinking)
    assert renderer_of(thinking=thinking).render(messages).token_ids == package_renderer.render(messages)


@pytest.mark.parametrize("thinking", [True, False])
def test_auto_finds_the_format_of_the_template(thinking):
    chosen = choose_format(GLM45, RenderConfig(thinking=thinking, keep_thinking=True))
    assert isinstance(chosen, Glm45)
    assert chosen.name == "glm-4.5"


# GLM-4.5: turns that follow


thoughts = st.one_of(st.none(), st.just(""), words)
turns = st.tuples(
    thoughts, words, st.booleans(), st.sampled_from(["user", "tool", "both"]), st.sampled_from((*ENDS, ""))
)


def said_of(thought, answer, calls):
    """A turn as GLM-4.5 says it: after the opener's marker, a newline comes first."""
    reasoning = "" if thought is None else f"\n<think>{thought}</think>"
    return f"{reasoning}\n{answer}" + (f"\n{CALL}" if calls else "")


def new_of(kind):
    return {"user": (MORE,), "tool": (FOUND, FOUND), "both": (FOUND, MORE)}[kind]


@given(st.lists(turns, min_size=1, max_size=4), st.booleans())
def test_a_bridge_says_what_the_template_says_and_forks_only_where_it_must(played, thinking):
    renderer, tools = renderer_of(thinking=thinking), (look_up,)
    messages, prompt = [ASK], renderer.render((ASK,), (look_up,)).token_ids
    for thought, answer, calls, kind, end in played:
        sampled = ids_of(renderer, said_of(thought, answer, calls), end)
        said, new = renderer.parse(sampled, tools), new_of(kind)
        assert len(said.tool_calls) == calls
        messages.append(said)
        added = added_ids(renderer.bridge(messages, sampled, new, tools))
        messages.extend(new)
        plain = [Message(message.role, message.content) for message in messages]
        full_template_text = template_text(GLM45, "glm-4.5", plain, tools, enable_thinking=thinking)
        appended = renderer.decode(prompt + sampled)
        if isinstance(added, Fork):
            assert not full_template_text.startswith(appended)
            rewritten = not full_template_text.startswith(renderer.decode(prompt) + said.content)
            assert added.reason is (ForkReason.THINKING if rewritten else ForkReason.END_TOKEN)
            prompt = renderer.render(messages, tools).token_ids
        else:
            prompt += sampled + added
        assert renderer.decode(prompt) == full_template_text


@given(st.lists(turns, min_size=1, max_size=4), st.booleans())
def test_kept_thinking_stays_one_row(played, thinking):
    renderer, tools = renderer_of(thinking=thinking, keep_thinking=True), (look_up,)
    messages, prompt = [ASK], renderer.render((ASK,), (look_up,)).token_ids
    for thought, answer, calls, kind, end in played:
        new = new_of(kind)
        meant = "<|user|>" if new[0].role == "user" else "<|observation|>"
        sampled = ids_of(renderer, said_of(thought, answer, calls), end and meant)
        messages.append(renderer.parse(sampled, tools))
        added = added_ids(renderer.bridge(messages, sampled, new, tools))
        assert not isinstance(added, Fork)
        prompt += sampled + added
        messages.extend(new)
        assert renderer.render(messages, tools).token_ids == prompt


@given(words, words, st.sampled_from([(FOUND,), (FOUND, FOUND)]))
def test_bridges_are_those_of_another_renderer(thought, answer, new):
    renderer, package_renderer = renderer_of(), Other(GLM45, "glm-4.5")
    prompt = renderer.render((ASK,)).token_ids
    sampled = ids_of(renderer, said_of(thought, answer, True), "<|observation|>")
    added = added_ids(renderer.bridge((ASK, renderer.parse(sampled)), sampled, new))
    assert prompt + sampled + added == package_renderer.bridge(prompt, sampled, new)


@pytest.mark.parametrize("name", ["glm-4", "glm-4.5"])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("new", "meant"), [((MORE,), "<|user|>"), ((FOUND,), "<|observation|>")])
def test_the_marker_that_ends_a_turn_is_the_first_token_of_the_next_message(name, end, new, meant):
    renderer = renderer_of(name)
    text = "\n<think></think>\nhm"
    if end == meant:
        full_ids = bridged(renderer, (ASK,), text, end, new)
        assert full_ids.count(meant) == 1 + (meant == "<|user|>")
        assert f"hm{meant}\n" in full_ids
        assert full_ids.endswith("<|assistant|>")
    else:
        fork = bridged(renderer, (ASK,), text, end, new)
        assert fork.reason is ForkReason.END_TOKEN
        assert repr(end) in fork.detail
        assert repr(meant) in fork.detail


@pytest.mark.parametrize("name", ["glm-4", "glm-4.5"])
@pytest.mark.parametrize("new", [(MORE,), (FOUND,), (Message("system", "Be brief."),)])
def test_a_turn_that_was_cut_off_gets_the_next_marker_once(name, new):
    renderer = renderer_of(name)
    text = "\n<think></think>\nhm"
    sampled = ids_of(renderer, text)
    added = added_ids(renderer.bridge((ASK, renderer.parse(sampled)), sampled, new))
    prompt = renderer.render((ASK,)).token_ids + sampled + added
    assert prompt == renderer.render((ASK, renderer.parse(sampled), *new)).token_ids
    assert renderer.decode(added).count("<|") == 2  # the new message's marker, and the opener's


def test_end_tokens():
    for name in ("glm-4", "glm-4.5"):
        renderer = renderer_of(name)
        assert [renderer.decode([index]) for index in renderer.end_token_ids] == list(ENDS)
        ids = ids_of(renderer, "\nhm")
        assert {renderer.parse((*ids, end)).content for end in renderer.end_token_ids} == {"\nhm"}


def test_a_fork_says_what_the_format_does():
    renderer = renderer_of()
    thought, empty, none = "\n<think>so</think>\nhm", "\n<think></think>\nhm", "\nhm"
    assert bridged(renderer, (ASK,), thought, "<|user|>", (MORE,)).detail == (
        "a new user message leaves earlier reasoning out"
    )
    assert bridged(renderer, (ASK,), none, "<|user|>", (MORE,)).detail == (
        "the format adds an empty thought to a turn without reasoning"
    )
    assert "so</think>\nhm<|observation|>\n" in bridged(renderer, (ASK,), thought, "<|observation|>", (FOUND,))
    assert "</think>\nhm<|user|>\nAnd" in bridged(renderer, (ASK,), empty, "<|user|>", (MORE,))
    # What an earlier user message left out of the prompt cannot be left out again.
    earlier = (ASK, renderer.parse(ids_of(renderer, thought)), MORE)
    assert "hm<|user|>\nAnd" in bridged(renderer, earlier, empty, "<|user|>", (MORE,))


def test_without_thinking_users_say_so_once():
    renderer = renderer_of(thinking=False)
    prompt = renderer.decode(renderer.render((Message("user", "a"), Message("user", "b/nothink"))).token_ids)
    assert prompt == "[gMASK]<sop><|user|>\na/nothink<|user|>\nb/nothink<|assistant|>\n<think></think>"
    full_ids = bridged(renderer, (ASK,), "\nParis", "<|user|>", (MORE,))
    assert full_ids.endswith("\n<think></think>\nParis<|user|>\nAnd of Spain?/nothink<|assistant|>\n<think></think>")
    assert bridged(renderer, (ASK,), "\n<think>so</think>\nParis", "<|observation|>", (FOUND,)).reason is (
        ForkReason.THINKING
    )


# GLM-4


@tool(timeout_s=1, parameters={"type": "object", "properties": {"word": {"type": "string"}}})
async def find(word: str) -> str:
    """Find 词."""
    return word


def test_glm4_text():
    call = Message("assistant", "", (ToolCall("c1", "find", {"word": "é"}), ToolCall("c2", "find", {})))
    written = Glm4().text(
        (Message("system", "Be brief."), ASK, Message("assistant", "Let me see.", call.tool_calls[:1]), FOUND, call),
        [find],
    )
    schema = {"name": "find", "description": "Find 词.", "parameters": dict(find.parameters)}
    assert written == (
        "[gMASK]<sop><|system|>\n你是一个名为 ChatGLM 的人工智能助手。你是基于智谱AI训练的语言模型 GLM-4 模型开发的，"
        "你的任务是针对用户的问题和要求提供适当的答复和支持。\n\n# 可用工具\n\n## find\n\n"
        f"{json.dumps(schema, ensure_ascii=False, indent=4)}\n在调用上述函数时，请使用 Json 格式表示调用的参数。"
        "<|system|>\nBe brief.<|user|>\nWhat is the capital of France?<|assistant|>\nLet me see."
        '<|assistant|>find\n{"word": "é"}<|observation|>\nParis<|assistant|>find\n{"word": "é"}<|assistant|>find\n{}'
        "<|assistant|>"
    )


@given(st.lists(st.tuples(contents, st.sampled_from(["user", "tool", "both"]), st.booleans()), min_size=1, max_size=4))
def test_glm4_goes_on_by_appending_alone(played):
    renderer, tools = renderer_of("glm-4"), (find,)
    messages, prompt = [ASK], renderer.render((ASK,), (find,)).token_ids
    for text, kind, ended in played:
        new = new_of(kind)
        end = "<|user|>" if new[0].role == "user" else "<|observation|>"
        sampled = (*renderer.encode(f"\n{text}"), *(ids_of(renderer, end) if ended else ()))
        messages.append(renderer.parse(sampled, tools))
        added = added_ids(renderer.bridge(messages, sampled, new, tools))
        prompt += sampled + added
        messages.extend(new)
        plain = [message if message.role != "assistant" else Message("assistant", message.content[1:])
                 for message in messages]  # fmt: skip
        assert renderer.decode(prompt) == renderer.decode(renderer.render(plain, tools).token_ids)


def test_a_marker_that_is_only_spelt_stays_text_when_a_conversation_is_rendered_anew():
    renderer = renderer_of()
    message = renderer.parse((*ids_of(renderer, "\n<think></think>\n"), *renderer.encode("<|user|> said")))
    prompt = renderer.render((ASK, message, FOUND)).token_ids
    assert prompt.count(renderer.end_token_id) == 1
    assert "</think>\n<|user|> said<|observation|>" in renderer.decode(prompt)
