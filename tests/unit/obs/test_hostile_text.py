"""Text that others choose reaches the terminal as it is, or as pictures: never as markup, never as a terminal command."""

import json
import logging
import re
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl import Message, Task
from agentrl.audit.report import DriftedTurn, Fault, Report, Violation, example_lines, report_table
from agentrl.cli import main as command_line
from agentrl.config.evaluation import EvalSet
from agentrl.core.errors import AgentrlError, RunStopped, UserError
from agentrl.core.types import Failure, FailureKind, FinishReason, Rollout, StopReason, Turn
from agentrl.evaluation.evaluate import SetResult
from agentrl.evaluation.metrics import compute_metrics
from agentrl.evaluation.sets import EvalTasks
from agentrl.evaluation.table import results_lines, results_table
from agentrl.obs.console import TitledBlock, log_to_stderr, make_console, print_error, print_message, printable
from agentrl.obs.progress import EpisodeProgress, ProgressView
from agentrl.obs.viewer.run_files import Entry
from agentrl.obs.viewer.terminal import rollout_panel, rollout_view, tokens_table
from agentrl.sandbox.base import Defence
from agentrl.sandbox.canary.check import Finding, as_text, findings_table
from agentrl.train.run_outputs import print_summary

MARKUP = [
    "[/INST] q7",
    "[INST] q7 [/INST]",
    "[bold red]x[/bold red]",
    "[/]",
    "[/red]",
    "[red",
    "\\[red]",
    "runs/[a]/[b",
    "[link=https://example.org]x[/link]",
    "[@click=app.bell]x[/]",
    ":warning: :smile:",
    "a\\",
]
"""Read as it is written."""
CONTROLS = [
    "\x1b]0;owned\x07",
    "\x1b]8;;https://example.org\x1b\\x",
    "\x1b[2J\x1b[Hx",
    "\x1b[31;1;5mx",
    "\x1b[6n",
    "\x9b2Jx",
    "\x90q\x9c",
    "a\rb",
    "a\x08\x08b",
    "a\x0b\x0cb",
    "a\x00b\x7f",
    "\u202egnp.exe",
    "\u2066x\u2069\u200e\u200f\u061c",
    "a\u2028b\u2029c\x85d",
    "\ufeff\u200b\u00ad",
    "\U000e0041\U000e007f",
    "half \udc80\ud800",
]
"""Shown as pictures, or left out."""
HOSTILE = [*MARKUP, *CONTROLS, " ".join(CONTROLS + MARKUP)]

Draw = Callable[[Console, str], None]


def a_rollout(text: str) -> Rollout:
    turns = [Turn(text, text, FinishReason.STOP)]
    return Rollout(text, text, [], 0.5, StopReason.TERMINATED, {text: 1.0}, turns=turns, prompt=text, label=text)


def a_result(text: str) -> SetResult:
    tasks = [Task(text, (Message("user", text),))]
    return SetResult(EvalTasks(text, EvalSet(), tasks, text), compute_metrics([a_rollout(text)]), [a_rollout(text)])


def a_table(console: Console, text: str) -> None:
    table = Table(text, title=text, caption=text)
    table.add_row(text)
    table.add_row(Text(text))
    console.print(table)


def progress(console: Console, text: str) -> None:
    with ProgressView(console, 2) as view:
        view.phase(text)
        view.note(text)
        view.note(rollout_panel(a_rollout(text), text, lambda ids: text))
        view.print_text(text)
        view.step(1, {text: 1.0})


def episodes(console: Console, text: str) -> None:
    with EpisodeProgress(console, 2, text) as count:
        count.begin()
        count.print_text(text)


def audit(console: Console, text: str) -> None:
    drifted = DriftedTurn(text, text, 0, text, (1,), (2,))
    report = Report(forks=Report().forks | {text: 1}, examples=[drifted])
    console.print(report_table(report, text))
    for line in example_lines(report):
        console.print(line)
    console.print(str(Violation(text, text, Fault(text))), style="red")


def viewer(console: Console, text: str) -> None:
    failed = replace(a_rollout(text), failure=Failure(FailureKind.TOOL, text, text))
    for rollout in (a_rollout(text), failed):
        console.print(rollout_view(Entry(1, rollout), text))
        console.print(tokens_table(Entry(1, rollout), text))


def evaluation(console: Console, text: str) -> None:
    console.print(results_table([a_result(text)], text))
    for line in results_lines([a_result(text)]):
        print_message(console, line)


PATHS: dict[str, Draw] = {
    "print": lambda console, text: console.print(text),
    "print with a style": lambda console, text: console.print(text, style="yellow"),
    "text": lambda console, text: console.print(Text(text)),
    "message": print_message,
    "error": lambda console, text: print_error(console, "error", UserError(text)),
    "block": lambda console, text: console.print(TitledBlock(text, Text(text))),
    "table": a_table,
    "JSON": lambda console, text: console.print_json(json.dumps({"text": text})),
    "progress": progress,
    "episodes": episodes,
    "rollout": lambda console, text: console.print(rollout_panel(a_rollout(text), text, lambda ids: text)),
    "viewer": viewer,
    "audit": audit,
    "evaluation": evaluation,
    "canary": lambda console, text: console.print(findings_table([Finding(Defence.SECCOMP, text, True, text)], text)),
    "canary in the log": lambda console, text: console.print(
        as_text(findings_table([Finding(Defence.SECCOMP, text, True, text)], text))
    ),
}


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


OF_RICH = re.compile(r"\x1b\[(?:\d+(?:;\d+)*m|\?25[lh]|[12]?[AK])|\r")
"""What rich itself writes: styles, and the live view's cursor movements."""


def unprintable(output: str) -> set[str]:
    return {
        line
        for line in output
        if line not in "\n\u200c\u200d" and unicodedata.category(line) in {"Cc", "Cf", "Cs", "Zl", "Zp"}
    }


@pytest.mark.parametrize("path", PATHS)
def test_in_a_log(path: str) -> None:
    for text in HOSTILE:
        out = StringIO()
        PATHS[path](make_console(file=out), text)
        assert not unprintable(out.getvalue()), text
        if text in MARKUP:
            shown = json.dumps(text)[1:-1] if path == "JSON" else text
            assert shown in out.getvalue(), text


@pytest.mark.parametrize("path", PATHS)
def test_in_a_terminal(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    for text in HOSTILE:
        out = Terminal()
        PATHS[path](make_console(file=out), text)
        for sequence in ("\x1b]", "\x1b[2J", "\x1b[6n", "\x1b[31;1;5m"):
            assert sequence not in out.getvalue(), text
        assert not unprintable(OF_RICH.sub("", out.getvalue())), text


@pytest.mark.parametrize(("error", "status"), [(UserError, 2), (RunStopped, 1), (AgentrlError, 1)])
def test_the_end_of_a_command(error: type[AgentrlError], status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in HOSTILE:
        out = StringIO()
        monkeypatch.setattr(sys, "stderr", out)

        def fail(arguments: object, text: str = text) -> None:
            raise error(text)

        monkeypatch.setattr("agentrl.cli.models.run", fail)
        assert command_line.main(["models", "list"]) == status
        assert not unprintable(out.getvalue()), text
        if text in MARKUP:
            assert f": {text}\n" in out.getvalue()


def test_records_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    for text in HOSTILE:
        out = StringIO()
        monkeypatch.setattr(sys, "stderr", out)
        root.handlers.clear()
        log_to_stderr()
        logging.getLogger("agentrl.test").warning("task %s", text)
        assert not unprintable(out.getvalue()), text
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ WARNING agentrl.test: task ", out.getvalue())
        if text in MARKUP:
            assert text in out.getvalue()


def test_the_summary_of_a_run(tmp_path: Path) -> None:
    for text in HOSTILE:
        if "\x00" in text or "\ud800" in text:
            continue  # no name of a file
        folder = tmp_path / text.replace("/", "_")
        (folder / "rollouts").mkdir(parents=True)
        out = StringIO()
        print_summary(make_console(file=out), folder, 1, {f"eval/{text}": 0.5}, None)
        assert not unprintable(out.getvalue())
        assert json.loads(out.getvalue().splitlines()[-1]) == {f"eval/{text}": 0.5}


def test_what_is_printable_is_not_changed() -> None:
    for text in ("", "plain", "a\tb\n", "größe 東京 🙂 👨\u200d👩\u200d👧 \u00a0 عربي हिन्दी", "␛"):
        assert printable(text) == text
    assert printable("a\n", lines=False) == "a␊"
    assert printable("\x1b[2J\x9b\u202e\ud800") == "␛[2J␦␦␦"
