"""`agentrl template check` of every chat template that ``trl`` ships, with Qwen's tokenizer and the templates' own markers."""

import re
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from agentrl.config.model import FormatName, RenderConfig
from agentrl.core.types import Fork, ForkReason, Message, ToolCall
from agentrl.render.formats.base import Format
from agentrl.render.formats.template import TemplateFormat
from agentrl.render.probes import KINDS, Arrival
from agentrl.render.registry import make_renderer
from agentrl.render.renderer import ChatRenderer
from agentrl.render.template_check.check import Findings, check_template
from agentrl.render.template_check.turn_transitions import Continuation
from tests.unit.render.conversations import added_ids, look_up
from tests.unit.render.tokenizers import qwen_tokenizer_with

_PACKAGE = find_spec("trl")
assert _PACKAGE is not None, "pip install trl (part of agentrl-framework[dev])"
FILES = {file.stem: file for file in sorted((Path(str(_PACKAGE.origin)).parent / "chat_templates").glob("*.jinja"))}
NAMES = tuple(FILES)
KEPT_FOR_TRAINING = ("gptoss_training", "qwen3_training")
"""Templates that mark what the policy said; those of the others say what the ones without the marks say, which is tested."""
MOSTLY_NAMES = [
    pytest.param(name, marks=[pytest.mark.long] if name.endswith("_training") and name not in KEPT_FOR_TRAINING else [])
    for name in NAMES
]
ASK, MORE, SYSTEM = Message("user", "qa1"), Message("user", "qa2"), Message("system", "sy1")
LATER, RESULTS = ("later system messages",), ("tool results", "several tool results")


@cache
def texts() -> dict[str, str]:
    return {name: file.read_text(encoding="utf-8") for name, file in FILES.items()}


@cache
def tokenizer(name: str) -> PreTrainedTokenizerBase:
    markers = sorted({mark for text in texts().values() for mark in re.findall(r"<[|｜][^\s<>|｜]+[|｜]>", text)})
    return qwen_tokenizer_with(markers, texts()[name])


@cache
def renderer_of(name: str, format: FormatName = "auto", *, keep_thinking: bool = False) -> ChatRenderer:
    return make_renderer(tokenizer(name), RenderConfig(format=format, keep_thinking=keep_thinking))


@cache
def check(name: str) -> Findings:
    return check_template(tokenizer(name))


LOST = {
    "cohere2": RESULTS,
    "deepseek_r1_distill": LATER,
    "gptoss": LATER,
    "phi3": RESULTS,
    "phi3_5": RESULTS,
    "qwen3_vl": LATER,
}
"""What templates leave out without an error."""
DROP_REASONING = ("nemotron_3_nano", "nemotron_3_super", "qwen3", "glm4moe")
"""Some of the templates that leave reasoning out of turns before the last user message, with content and calls too."""


@pytest.mark.parametrize("name", MOSTLY_NAMES)
def test_what_is_said_arrives_and_nothing_forks_needlessly(name: str) -> None:
    findings = check(name)
    assert findings.fault == ""
    for kind in ("user messages", "later user messages", "given assistant messages"):
        assert findings.arrivals[kind] is Arrival.ARRIVES, kind
    assert findings.lost == LOST.get(name.removesuffix("_training"), ())
    assert findings.needless_forks == ()
    assert findings.inexact == ()
    for transition in findings.transitions:
        if transition.reason is ForkReason.THINKING:
            assert transition.drops_thinking or transition.preserved is False, transition


@pytest.mark.parametrize(
    "name", ["qwen3_8", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_5_lightning", "muse_glimmer", "gemma4"]
)
def test_calls_and_their_results_are_one_row(name: str) -> None:
    results = [
        transition
        for transition in check(name).transitions
        if transition.turn == "tool call" and transition.before.endswith("results")
    ]
    results += [
        transition
        for transition in check(name).transitions
        if transition.turn == "tool call" and transition.before == "a tool result"
    ]
    assert {transition.continuation for transition in results} == {Continuation.BRIDGE}
    assert {transition.exact for transition in results} == {True}


def text_of(format: Format, *messages: Message) -> str:
    """Return the template's text of a conversation about calls, or nothing if it refuses it."""
    try:
        return format.text(messages, (look_up,) if any(message.tool_calls for message in messages) else ())
    except ValueError:
        return ""


@pytest.mark.parametrize("name", MOSTLY_NAMES)
@pytest.mark.parametrize("calls", [(), (ToolCall("call00000", "look_up", {"word": "ar"}),)], ids=["answer", "call"])
@pytest.mark.parametrize("thought", ["re1", ""])
def test_a_turn_without_its_reasoning_is_written_as_the_template_writes_it(name: str, thought: str, calls) -> None:
    """A sampled turn, of which the template drops the reasoning before a later user message, and the same turn as given."""
    renderer = renderer_of(name, "template")
    format = renderer.format
    assert isinstance(format, TemplateFormat)
    inputs, start = format.inputs, format._layout.start
    later = (Message("tool", "fo", tool_call_id="call00000"), Message("assistant", "as2")) if calls else ()
    plain, given = (Message("assistant", f"{head}as1", calls) for head in ("", f"<think>\n{thought}\n</think>\n\n"))
    expected = text_of(format, ASK, given, *later, MORE)
    head, said, tail = text_of(format, ASK, plain, *later, MORE).rpartition("qa1")[2].partition("as1")
    tail = tail[: format._layout.end_at(tail, tail.find("ar") if calls else 0)]
    reasoning = f"<think>\n{thought}\n</think>\n\n"
    if not said or "re1" in expected or reasoning in expected or "as1" not in expected or (calls and "ar" not in tail):
        assert name not in DROP_REASONING
        return
    if not inputs.thinks:
        header = head.rpartition(start)[2].removeprefix(inputs.closing.rpartition(start)[2])
        reasoning = inputs.opening + thought + inputs.closing + header
    body = (reasoning.removeprefix("<think>\n") if format.opens_thinking else reasoning) + "as1" + tail
    sampled = renderer.parse(tokenizer(name).encode(body, add_special_tokens=False), (look_up,) if calls else ())
    if [call.name for call in sampled.tool_calls] != [call.name for call in calls]:
        assert name not in DROP_REASONING
        return  # another parser reads these calls
    sampled = replace(sampled, tool_calls=calls)
    assert text_of(format, ASK, sampled, *later, MORE) == expected


@pytest.mark.parametrize("name", MOSTLY_NAMES)
@pytest.mark.parametrize(
    "new", [(SYSTEM,), (SYSTEM, MORE), (MORE, SYSTEM)], ids=["system", "system, user", "user, system"]
)
def test_later_system_messages_are_in_a_bridged_prompt(name: str, new: tuple[Message, ...]) -> None:
    """With earlier reasoning kept too, a template that moves them to the front is rendered again."""
    for keep in (False, True):
        renderer = renderer_of(name, keep_thinking=keep)
        for body in ("re1\n</think>\n\nas1", "<think>\nre1\n</think>\n\nas1", "as1"):
            ids = renderer.encode(body)
            added = added_ids(renderer.bridge((ASK, renderer.parse(ids)), ids, new))
            assert isinstance(added, Fork) or all(message.content in renderer.decode(added) for message in new)


@pytest.mark.parametrize("name", MOSTLY_NAMES)
def test_the_page_has_its_row(name: str) -> None:
    assert table_row(name) in lines_of_table()[2:]


def test_the_page_has_a_row_for_each_template() -> None:
    """`python -m tests.unit.render.test_every_template` prints the table."""
    head, *rows = lines_of_table()
    assert [head, rows[0]] == list(TABLE_HEAD)
    assert tuple(row.split(" ")[1] for row in rows[1:]) == NAMES


TABLE_HEAD = (
    f"| template | format | verdict | {' | '.join(KINDS)} | needless forks |",
    "|" + "---|" * (len(KINDS) + 4),
)


def table_row(name: str) -> str:
    """Return the row of a template: format, verdict, and what becomes of each kind of text."""
    findings = check(name)
    verdict = "leaves texts out" if findings.lost else "usable"
    cells = [_SIGNS[findings.arrivals[kind]] for kind in KINDS]
    cells = [name, findings.format, verdict, *cells, str(len(findings.needless_forks))]
    return f"| {' | '.join(cells)} |"


@cache
def lines_of_table() -> list[str]:
    """Return the lines of the table on the page of chat templates, head first."""
    page = Path(__file__).parents[3] / "docs" / "explanation" / "chat_templates.md"
    _, _, text = page.read_text(encoding="utf-8").partition(TABLE_HEAD[0])
    return [TABLE_HEAD[0], *text.partition("\n\n")[0].split("\n")[1:]]


_SIGNS = {Arrival.ARRIVES: "yes", Arrival.LOST: "**lost**", Arrival.ABSENT: "no place", Arrival.REFUSED: "refused"}

if __name__ == "__main__":
    print("\n".join((*TABLE_HEAD, *map(table_row, NAMES))))
