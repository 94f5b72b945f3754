import re
import sys
from io import StringIO

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.obs.console import TitledBlock, make_console, print_message
from agentrl.obs.progress import ProgressView


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


LONG = "word " * 60


@pytest.mark.parametrize("color", [False, True])
def test_output_that_is_not_a_terminal_is_one_line_a_step(monkeypatch: pytest.MonkeyPatch, color: bool) -> None:
    out = StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    if color:
        monkeypatch.setenv("FORCE_COLOR", "1")
    console = make_console()
    console.print(LONG)
    table = Table("name", "text")
    table.add_row("a", LONG)
    console.print(table)
    metrics = {"train/reward": 0.5, "rollout/exact_match": 0.5, "rollout/searches": 1.0, "time/step_s": 1.0}
    metrics |= {f"time/{name}": 1.0 for name in ("tokens_per_s", "rollout_s", "tools_share", "sync_s", "train_s")}
    ProgressView(console, 10, "plain").step(1, metrics)
    assert len(out.getvalue().splitlines()) == 1 + 5 + 1


def test_a_titled_block_is_a_panel_in_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    block = TitledBlock("one [rollout]", Text(LONG), Text("end"))
    out = StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    make_console(stderr=True).print(block)
    assert out.getvalue().splitlines() == ["one [rollout]", LONG, "end"]
    terminal = Terminal()
    Console(file=terminal, width=80, color_system=None).print(block)
    lines = terminal.getvalue().splitlines()
    assert "╭─ one [rollout] ─" in lines[0]
    assert {len(line) for line in lines} == {80}


def test_a_terminal_wraps_at_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", "80")
    make_console().print(LONG)
    assert len(out.getvalue().splitlines()) == 4


def test_a_message_is_one_line_with_the_time_where_the_output_is_no_terminal() -> None:
    log, terminal = StringIO(), Terminal()
    print_message(make_console(file=log), LONG)
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d {LONG}\n", log.getvalue())
    print_message(make_console(file=terminal), LONG)
    assert terminal.getvalue() == f"{LONG}\n", "the terminal wraps it, so it can be copied whole"
