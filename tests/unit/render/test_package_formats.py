"""Formats of the package ``renderers``: its ids, our escaping, bridges and parsers."""

from dataclasses import replace
from functools import cache

import pytest

import agentrl.core.extras
from agentrl.config.model import RenderConfig
from agentrl.core.errors import MissingError, ModelError
from agentrl.core.types import CallStatus, Fork, Message, ToolCall
from agentrl.render.formats.package import PACKAGE_FORMATS, PREFIX
from agentrl.render.probes import TOOLS
from agentrl.render.registry import make_renderer
from agentrl.render.template_check.check import check_template
from tests.unit.render.conversations import added_ids
from tests.unit.render.oracles import Other
from tests.unit.render.tokenizers import FAMILIES, Added, _tokenizer

_HY = ":opensource"
_DEEPSEEK = ("User", "Assistant", "latest_reminder", "action", "query", "authority", "domain", "title", "read_url")
_KIMI, _GLM = FAMILIES["kimi-k2"], FAMILIES["glm-4.5"]
_HY_TAGS = ("think", "tool_calls", "tool_call", "arg_key", "arg_value", "tool_responses", "tool_response")
OWN = {
    "minimax-m2": Added(
        ("]~!b[", "]~b]", "[e~["), ("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"), "[e~[", "]~!b["
    ),
    "deepseek-v4": Added(
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "｜DSML｜"),
        (*(f"<｜{name}｜>" for name in _DEEPSEEK), "<think>", "</think>"),
        "<｜end▁of▁sentence｜>",
        "<｜▁pad▁｜>",
    ),
    "kimi-k2.5": _KIMI._replace(
        special=(*_KIMI.special, *(f"<|media_{name}|>" for name in ("begin", "content", "pad", "end"))),
        plain=(*_KIMI.plain, "<think>", "</think>"),
    ),
    "gemma4": Added(
        ("<bos>", "<eos>", "<pad>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>",
         "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>', "<|image>", "<|image|>", "<image|>"),
        (),
        "<turn|>",
        "<pad>",
        "<bos>",
    ),
    "hy3": Added(
        tuple(f"<｜{name}{_HY}｜>" for name in ("hy_begin_of_sentence", "hy_eos", "hy_User", "hy_Assistant", "reasoning_mode")),
        tuple(f"<{name}{_HY}>" for name in ("tool_sep", *_HY_TAGS, *(f"/{name}" for name in _HY_TAGS))),
        f"<｜hy_eos{_HY}｜>",
        f"<｜hy_eos{_HY}｜>",
    ),
    "glm-5": _GLM,
    "glm-5.1": _GLM,
}  # fmt: skip
"""What a family adds to the BPE; the others add what Qwen3 does."""

every_format = pytest.mark.parametrize("name", PACKAGE_FORMATS)
ASK, SYSTEM, MORE = Message("user", "qa1"), Message("system", "sy1"), Message("user", "qa2")
CALL = Message("assistant", "", (ToolCall("functions.look_up:0", "look_up", {"word": "é", "page": 3}),))
FOUND = Message("tool", "fo1", tool_call_id="functions.look_up:0")
CONVERSATIONS = (
    ((ASK,), ()),
    ((SYSTEM, ASK), ()),
    ((ASK, Message("assistant", "as1"), MORE), ()),
    ((SYSTEM, ASK), TOOLS),
    ((ASK, CALL, FOUND), TOOLS),
    ((ASK, CALL, FOUND, Message("assistant", "as1"), MORE), TOOLS),
)


def tokenizer_of(name):
    return _tokenizer(OWN.get(name.removeprefix(PREFIX), FAMILIES["qwen3"]))


@cache
def renderer_of(name):
    return make_renderer(tokenizer_of(name), RenderConfig(format=name))


@every_format
def test_the_ids_are_those_of_the_package(name):
    other_token_ids = Other(tokenizer_of(name), name.removeprefix(PREFIX))
    for messages, tools in CONVERSATIONS:
        assert renderer_of(name).render(messages, tools).token_ids == other_token_ids.render(messages, tools)


@every_format
def test_special_token_text_in_contents_stays_text(name):
    renderer, tokenizer = renderer_of(name), tokenizer_of(name)
    special = {index: token.content for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    hostile = "".join(special.values())

    def marks(text):
        messages = [replace(message, content=text) for message in (SYSTEM, ASK)]
        turn = replace(CALL, tool_calls=(ToolCall("functions.look_up:0", "look_up", {"word": text}),))
        ids = renderer.render((*messages, turn, replace(FOUND, content=text)), TOOLS).token_ids
        assert text in renderer.decode(ids)
        return [index for index in ids if index in special]

    assert marks(hostile) == marks("x")


@every_format
def test_the_format_passes_the_check_of_templates(name):
    """Bridges write what the whole conversation would, and the parser reads the calls."""
    findings = check_template(tokenizer_of(name), RenderConfig(format=name))
    assert findings.fault == ""
    assert findings.parser == PACKAGE_FORMATS[name]
    # Kimi's parser reads ids that name the function only, which those of the check do not.
    assert findings.reads_calls is True or name == "renderers:kimi-k2.5"
    assert [transition for transition in findings.transitions if transition.exact is False] == []


@every_format
def test_a_turn_with_a_call_is_read_and_answered_as_the_package_does(name):
    """The call as the package writes it, after the opener. Bridged ids are those of its whole conversation, or its bridge's."""
    renderer, other_token_ids = renderer_of(name), Other(tokenizer_of(name), name.removeprefix(PREFIX))
    prompt, full_ids = other_token_ids.render((ASK,), TOOLS), other_token_ids.render((ASK, CALL, FOUND), TOOLS)
    shared = next(at for at, (first, two) in enumerate(zip((*prompt, -1), full_ids, strict=False)) if first != two)
    text = renderer.decode(full_ids[shared:])
    end = renderer.decode((next(index for index in full_ids[shared:] if index in renderer.end_token_ids),))
    thought = "re1\n</think>\n\n" if renderer.format.opens_thinking else ""
    said = thought + text[: text.index(end) + len(end)]
    sampled = tuple(tokenizer_of(name).encode(said, add_special_tokens=False))
    message = renderer.parse(sampled, TOOLS, prompt_ids=prompt)
    [call] = message.tool_calls
    assert (call.name, call.arguments, call.status) == ("look_up", {"word": "é", "page": 3}, CallStatus.OK)
    call = replace(call, id=call.id or "functions.look_up:0")  # as an episode names it
    message, answer = replace(message, tool_calls=(call,)), (replace(FOUND, tool_call_id=call.id),)
    added = added_ids(renderer.bridge((ASK, message), sampled, answer, TOOLS))
    theirs = other_token_ids.bridge(prompt, sampled, answer, TOOLS) if thought else full_ids
    if not isinstance(added, Fork) and theirs is not None:
        assert prompt + sampled + added == theirs


@every_format
def test_no_turn_of_a_policy_raises(name):
    renderer = renderer_of(name)
    for marker in (*renderer.parser.markers, "<think>", "x"):
        for text in (marker, marker * 40, f"{marker}{{]{marker}"):
            ids = tuple(tokenizer_of(name).encode(text, add_special_tokens=False))
            assert all(call.fault for call in renderer.parse(ids, TOOLS).tool_calls)


def test_a_tokenizer_of_another_family_is_refused():
    with pytest.raises(ModelError, match=r"render\.format=renderers:minimax-m2 does not fit the tokenizer"):
        make_renderer(tokenizer_of("renderers:glm-5"), RenderConfig(format="renderers:minimax-m2"))


def test_the_extra_is_named_without_the_package(monkeypatch):
    monkeypatch.setattr(agentrl.core.extras, "find_spec", lambda name: None)
    with pytest.raises(
        MissingError, match=r"render\.format=renderers:hy3 .*pip install 'agentrl-framework\[renderers\]'"
    ):
        make_renderer(tokenizer_of("renderers:hy3"), RenderConfig(format="renderers:hy3"))
