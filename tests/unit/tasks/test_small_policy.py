"""The small policies' tokenizer and template: calls and results go on token by token."""

from pathlib import Path

import pytest
from agentrl_tasks.small_policy import PolicySize, save_policy, tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl import Message
from agentrl.core.tool import Tool
from agentrl.core.types import CallStatus, Fork
from agentrl.render.registry import make_renderer
from agentrl.render.renderer import ChatRenderer
from agentrl.render.template_check.check import check_template
from agentrl.render.template_check.turn_transitions import Continuation
from tests.unit.render.conversations import added_ids

TEXTS = ["What is 12 times 13?", '{"name": "python", "arguments": {"code": "print(12)"}}', "The answer is \\boxed{25}."]
TOOL = Tool("python", "Run it.", {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]})
ASK = Message("user", "What is 12 times 13?")
SAID = '<tool_call>\n{"name": "python", "arguments": {"code": "x = \\"a\\"\\nprint(12 * 13)"}}\n</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    save_policy(folder, TEXTS * 3)
    return folder


@pytest.fixture(scope="module")
def renderer(folder: Path) -> ChatRenderer:
    return make_renderer(AutoTokenizer.from_pretrained(folder))


def test_the_prompt_names_the_tools(renderer: ChatRenderer) -> None:
    prompt = renderer.decode(renderer.render((ASK,), [TOOL]).token_ids)
    assert prompt == (
        "<|im_start|>system\nTools: python(code)<|im_end|>\n"
        "<|im_start|>user\nWhat is 12 times 13?<|im_end|>\n<|im_start|>assistant\n"
    )
    briefed = renderer.decode(renderer.render((Message("system", "Be brief."), ASK), [TOOL]).token_ids)
    assert briefed.startswith("<|im_start|>system\nBe brief.\nTools: python(code)<|im_end|>\n<|im_start|>user\n")
    assert renderer.decode(renderer.render((ASK,)).token_ids).startswith("<|im_start|>user\n")


def test_an_empty_message_of_the_system_is_none(renderer: ChatRenderer) -> None:
    """A policy that was trained without such a message has the same prompt from an agent program that sends an empty one."""
    empty, rule = Message("system", ""), Message("system", "Be short.")
    prompt = renderer.render((ASK,), [TOOL]).token_ids
    assert renderer.render((empty, ASK), [TOOL]).token_ids == prompt
    text = renderer.decode(renderer.render((rule, ASK), [TOOL]).token_ids)
    assert text.startswith("<|im_start|>system\nBe short.\nTools: python(code)<|im_end|>\n")


def test_a_call_is_read_and_its_result_appended(renderer: ChatRenderer) -> None:
    """Layout: prompt | what was said <|im_end|> | newline, result turn, opener: nothing before changes."""
    prompt = renderer.render((ASK,), [TOOL]).token_ids
    said_ids = (*renderer.encode(SAID), renderer.end_token_id)
    message = renderer.parse(said_ids, [TOOL], prompt_ids=prompt)
    (call,) = message.tool_calls
    assert (call.status, call.name) == (CallStatus.OK, "python")
    assert call.arguments == {"code": 'x = "a"\nprint(12 * 13)'}
    result = Message("tool", "156\n", tool_call_id="c")
    added = added_ids(renderer.bridge((ASK, message), said_ids, (result,), [TOOL]))
    assert not isinstance(added, Fork)
    assert renderer.decode(added) == "\n<|im_start|>tool\n156\n<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.render((ASK, message, result), [TOOL]).token_ids == (*prompt, *said_ids, *added)


def test_the_template_leaves_every_turn_as_it_was(folder: Path) -> None:
    findings = check_template(AutoTokenizer.from_pretrained(folder))
    assert (findings.fault, findings.parser, findings.reads_calls) == ("", "hermes", True)
    assert {transition.continuation for transition in findings.transitions} == {Continuation.BRIDGE}


def test_digits_stand_alone_and_nothing_is_lost(folder: Path) -> None:
    made = tokenizer(TEXTS * 3)
    assert made.get_vocab_size() <= 512
    text = "print(1234 * 56)\n\\boxed{é}"
    encoded = made.encode(text)
    assert made.decode(encoded.ids) == text
    assert sum(any(digit in token for digit in "0123456789") for token in encoded.tokens) == 6


def test_equal_texts_give_equal_policies(folder: Path, tmp_path: Path) -> None:
    save_policy(tmp_path, TEXTS * 3)
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert 1_000_000 < sum(weight.numel() for weight in model.parameters()) < 2_000_000


def test_a_size_is_that_of_the_model(tmp_path: Path) -> None:
    save_policy(tmp_path, TEXTS, size=PolicySize(hidden=64, layers=1, heads=2, key_value_heads=1, feed_forward=96))
    config = AutoModelForCausalLM.from_pretrained(tmp_path).config
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (64, 1, 96)
    assert (config.num_attention_heads, config.num_key_value_heads) == (2, 1)
