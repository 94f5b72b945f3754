"""`agentrl template check` of every chat template that ``trl`` ships, with Qwen's tokenizer and the templates' own markers."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from agentrl.core.types import ForkReason
from agentrl.render.template_check.check import Findings, check_template
from agentrl.render.template_check.turn_transitions import Continuation
from agentrl.render.text_arrival import KINDS, Arrival
from tests.unit.render.tokenizers import qwen_tokenizer_with

_PACKAGE = find_spec("trl")
assert _PACKAGE is not None, "pip install trl (part of agentrl-framework[dev])"
FILES = {file.stem: file for file in sorted((Path(str(_PACKAGE.origin)).parent / "chat_templates").glob("*.jinja"))}
NAMES = tuple(FILES)
LATER, RESULTS = ("later system messages",), ("tool results", "several tool results")


@cache
def texts() -> dict[str, str]:
    return {name: file.read_text(encoding="utf-8") for name, file in FILES.items()}


@cache
def check(name: str) -> Findings:
    markers = sorted({mark for text in texts().values() for mark in re.findall(r"<[|｜][^\s<>|｜]+[|｜]>", text)})
    return check_template(qwen_tokenizer_with(markers, texts()[name]))


LOST = {
    "cohere2": RESULTS,
    "deepseek_r1_distill": LATER,
    "gptoss": LATER,
    "phi3": RESULTS,
    "phi3_5": RESULTS,
    "qwen3_vl": LATER,
}
"""What templates leave out without an error."""


@pytest.mark.parametrize("name", NAMES)
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
    results = [one for one in check(name).transitions if one.turn == "tool call" and one.before.endswith("results")]
    results += [one for one in check(name).transitions if one.turn == "tool call" and one.before == "a tool result"]
    assert {one.continuation for one in results} == {Continuation.BRIDGE}
    assert {one.exact for one in results} == {True}


def test_the_page_has_the_table() -> None:
    """`python -m tests.unit.render.test_every_template` prints it."""
    page = Path(__file__).parents[3] / "docs" / "chat_templates.md"
    assert table() in page.read_text(encoding="utf-8")


def table() -> str:
    """Return a row for each template: format, verdict, and what becomes of each kind of text."""
    kinds = list(KINDS)
    rows = [
        f"| template | format | verdict | {' | '.join(kinds)} | needless forks |",
        "|" + "---|" * (len(kinds) + 4),
    ]
    for name in NAMES:
        findings = check(name)
        verdict = "leaves texts out" if findings.lost else "usable"
        cells = [_SIGNS[findings.arrivals[kind]] for kind in kinds]
        cells = [name, findings.format, verdict, *cells, str(len(findings.needless_forks))]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


_SIGNS = {Arrival.ARRIVES: "yes", Arrival.LOST: "**lost**", Arrival.ABSENT: "no place", Arrival.REFUSED: "refused"}

if __name__ == "__main__":
    print(table())
