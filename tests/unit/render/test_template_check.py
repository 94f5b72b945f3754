"""What the check says of the templates that ``trl`` ships, each with the tokens of its own family."""

from functools import cache
from pathlib import Path

import pytest

from agentrl.config.model import RenderConfig
from agentrl.core.errors import ModelError
from agentrl.core.types import ForkReason
from agentrl.render.template_check.check import Ending, Findings, check_template
from agentrl.render.template_check.turn_transitions import Continuation, TurnTransition
from tests.unit.render.oracles import template
from tests.unit.render.tokenizers import family_tokenizer

USER, RESULT, RESULTS, SYSTEM = "a user message", "a tool result", "two tool results", "a system message"
PAIRS = [
    ("qwen2.5", "qwen2.5"),
    ("qwen3", "qwen3"),
    ("qwen3", "qwen3-instruct"),
    ("qwen3", "qwen3_5_think"),
    ("qwen3", "qwen3_5_nothink"),
    ("qwen3", "qwen3_vl"),
    ("qwen3", "gptoss"),
    ("llama3", "llama3"),
    ("llama3", "llama3_1"),
    ("deepseek-r1", "deepseekv3"),
    ("glm-4.5", "glm-4.5"),
    ("qwen3", "gemma3"),
    ("qwen3", "cohere2"),
    ("qwen3", "nemotron_3_nano"),
]
"""Tokens of a family, and a template."""


@cache
def check(family: str, name: str, keep_thinking: bool = False) -> Findings:
    return check_template(family_tokenizer(family, template(name)), RenderConfig(keep_thinking=keep_thinking))


def at(findings: Findings, turn: str, state_before: str) -> TurnTransition:
    (result,) = (
        transition
        for transition in findings.transitions
        if (transition.turn, transition.before) == (turn, state_before)
    )
    return result


@pytest.mark.parametrize(
    ("family", "name", "preserved"),
    [
        ("qwen3", "qwen3", False),
        ("qwen3", "qwen3_5_think", False),
        ("glm-4.5", "glm-4.5", False),
        ("qwen2.5", "qwen2.5", True),
        ("llama3", "llama3_1", True),
        ("qwen3", "qwen3-instruct", True),
    ],
)
def test_a_user_message_after_reasoning(family: str, name: str, preserved: bool) -> None:
    transition = at(check(family, name), "reasoning", USER)
    assert transition.preserved is preserved
    assert (transition.difference is None) is preserved
    assert transition.drops_thinking is not preserved


def test_deepseek_never_has_the_reasoning_that_it_opens() -> None:
    """Its own words of a turn stay, which is what trl calls prefix-preserving; what was sampled is not among them."""
    transition = at(check("deepseek-r1", "deepseekv3"), "reasoning", USER)
    assert (transition.preserved, transition.stable, transition.drops_thinking) == (False, True, True)
    assert (at(check("qwen3", "qwen3"), "reasoning", USER)).stable is False


def test_gpt_oss_keeps_no_reasoning_but_before_a_result() -> None:
    """Its own fields of reasoning and calls are given to the template; the raw text, which it refuses, is not."""
    findings = check("qwen3", "gptoss")
    assert findings.fault == ""
    assert at(findings, "reasoning", USER).drops_thinking
    assert not at(findings, "tool call", RESULT).drops_thinking
    assert findings.lost == ("later system messages",)


def test_qwen3_row_by_row() -> None:
    """Only a user message after reasoning forks; with ``render.keep_thinking`` it does not."""
    forked, keeping = check("qwen3", "qwen3"), check("qwen3", "qwen3", keep_thinking=True)
    turns = [(transition.turn, transition.before) for transition in forked.transitions]
    assert turns == [
        *((turn, state_before) for turn in ("plain", "reasoning") for state_before in (USER, RESULT, RESULTS, SYSTEM)),
        *(("tool call", state_before) for state_before in (USER, RESULT, SYSTEM, RESULTS)),
    ]
    for state_before, state_after in zip(forked.transitions, keeping.transitions, strict=True):
        drops = (state_before.turn, state_before.before) == ("reasoning", USER)
        assert (state_before.continuation, state_after.continuation) == (
            (Continuation.FORK, Continuation.KEEP) if drops else (Continuation.BRIDGE, Continuation.BRIDGE)
        )
        assert state_before.reason is (ForkReason.THINKING if drops else None)
    difference = at(forked, "reasoning", USER).difference
    assert difference is not None
    assert difference.was.startswith("<think>\nre1\n</think>")
    assert difference.is_now.startswith("as1<|im_end|>")
    assert difference.shared.endswith("im_start|>assistant\n")


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_every_bridge_says_what_the_template_says(family: str, name: str) -> None:
    for transition in check(family, name).transitions:
        bridged = transition.continuation is Continuation.BRIDGE
        assert not bridged or transition.preserved is not False, transition
        assert transition.exact is (True if bridged and transition.preserved else None), transition
        assert (transition.reason is not None) is (transition.continuation is Continuation.FORK), transition


@pytest.mark.parametrize(
    ("family", "name", "format", "hand_written", "parser", "reads_calls"),
    [
        ("qwen2.5", "qwen2.5", "qwen2.5", True, "hermes", True),
        ("qwen3", "qwen3_vl", "template", False, "hermes", True),
        ("qwen3", "qwen3_5_think", "template", False, "qwen3-coder", True),
        ("llama3", "llama3", "llama3", True, "llama3", None),
        ("llama3", "llama3_1", "llama3.1", True, "llama3", True),
        ("deepseek-r1", "deepseekv3", "deepseek-r1", True, "deepseek", True),
        ("glm-4.5", "glm-4.5", "glm-4.5", True, "glm", True),
        ("qwen3", "gemma3", "template", False, "hermes", None),
    ],
)
def test_format_and_parser(
    family: str, name: str, format: str, hand_written: bool, parser: str, reads_calls: bool | None
) -> None:
    findings = check(family, name)
    assert (findings.format, findings.hand_written) == (format, hand_written)
    assert (findings.parser, findings.reads_calls) == (parser, reads_calls)
    if reads_calls is not None:
        assert (parser in findings.readers) is reads_calls


def test_another_parser_that_reads_the_calls_is_named() -> None:
    findings = check_template(family_tokenizer("qwen3", template("qwen3")), RenderConfig(tool_parser="kimi"))
    assert (findings.parser, findings.reads_calls) == ("kimi", False)
    assert "hermes" in findings.readers
    assert findings.summary().endswith("tool calls: kimi, which does not read the template's")


@pytest.mark.parametrize(
    ("family", "name", "written", "ending", "state_after"),
    [
        ("qwen3", "qwen3", ("<|im_end|>",), Ending.TRAINED, "\n"),
        ("llama3", "llama3_1", ("<|eot_id|>",), Ending.TRAINED, ""),
        ("deepseek-r1", "deepseekv3", ("<｜end▁of▁sentence｜>",), Ending.TRAINED, ""),
        ("glm-4.5", "glm-4.5", ("<|user|>", "<|observation|>"), Ending.TRAINED, ""),
        ("llama3", "qwen3", ("<|im_end|>",), Ending.SPLIT, "\n"),
        ("qwen3", "gptoss", ("<|return|>", "<|end|>"), Ending.SPLIT, ""),
    ],
)
def test_the_end_of_a_turn(family: str, name: str, written: tuple[str, ...], ending: Ending, state_after: str) -> None:
    end = check(family, name).end
    assert (end.written, end.ending, end.after) == (written, ending, state_after)
    assert end.after_tokens == len(state_after)
    assert (set(written) <= set(end.stops)) is (ending is Ending.TRAINED)


def test_an_end_token_that_the_engine_does_not_stop_at() -> None:
    """The last turn ends with another token than those before: the engine stops at the latter alone."""
    turn = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    end = "{% if loop.last %}<|endoftext|>{% else %}<|im_end|>{% endif %}\n{% endfor %}"
    opener = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer = family_tokenizer("qwen3", turn + end + opener)
    token_ids = check_template(tokenizer).end
    assert (token_ids.written, token_ids.stops, token_ids.ending) == (
        ("<|endoftext|>", "<|im_end|>"),
        ("<|im_end|>",),
        Ending.OTHER,
    )


def test_openers_and_markers() -> None:
    findings = check("qwen3", "qwen3")
    assert (findings.opener, findings.opens_thinking) == ("<|im_start|>assistant\n", False)
    assert {marker.text for marker in findings.markers} >= {"<|im_start|>", "<|im_end|>", "<think>", "<tool_call>"}
    assert findings.split_markers == ()
    assert check("qwen2.5", "qwen3").split_markers == ("<think>", "</think>"), "Qwen2.5 has no token for them"
    assert check("qwen2.5", "qwen2.5").split_markers == (), "its template says nothing of them"
    thinking = check("deepseek-r1", "deepseekv3")
    assert (thinking.opener, thinking.opens_thinking) == ("<｜Assistant｜><think>\n", True)


@pytest.mark.parametrize(
    ("family", "name", "keep", "line"),
    [
        ("qwen2.5", "qwen2.5", False, "qwen2.5, hand-written; one row an episode; turns end with <|im_end|>, which is trained; "
         "tool calls: hermes"),
        ("qwen3", "qwen3", False, "qwen3, hand-written; a new row before user messages once there is reasoning; turns end "
         "with <|im_end|>, which is trained; tool calls: hermes"),
        ("qwen3", "qwen3", True, "qwen3, hand-written; one row an episode, earlier reasoning kept; turns end with "
         "<|im_end|>, which is trained; tool calls: hermes"),
    ],
)  # fmt: skip
def test_the_line_of_train(family: str, name: str, keep: bool, line: str) -> None:
    assert check(family, name, keep).summary() == line


def test_a_template_without_tool_results() -> None:
    findings = check("qwen3", "gemma3")
    assert findings.fault == ""
    assert {at(findings, "plain", state_before).continuation for state_before in (RESULT, RESULTS)} == {
        Continuation.REFUSE
    }
    assert "no tool results" in findings.summary()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('never') }}", "never"),
        ("{% if %}", "Expected"),
        ("{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ raise_exception('no turns') }}{% endif %}"
         "{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}", "no turns"),
    ],
)  # fmt: skip
def test_templates_that_cannot_be_used_say_why(text: str | None, fault: str) -> None:
    findings = check_template(family_tokenizer("qwen3", text))
    assert fault in findings.fault
    assert findings.fault in findings.summary()


def test_another_template_and_another_format_can_be_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(template("qwen2.5"), encoding="utf-8")
    tokenizer = family_tokenizer("qwen3", template("qwen3"))
    assert check_template(tokenizer, RenderConfig(chat_template=file)).format == "qwen2.5"
    tokenizer = family_tokenizer("qwen3", template("qwen3"))
    token_ids = check_template(tokenizer, RenderConfig(format="qwen3", thinking=False))
    assert token_ids.opener == "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert at(token_ids, "plain", USER).reason is ForkReason.THINKING, "the opener's empty thought does not stay"
    with pytest.raises(ModelError, match=r"render\.format"):
        check_template(tokenizer, RenderConfig(format="llama3"))
