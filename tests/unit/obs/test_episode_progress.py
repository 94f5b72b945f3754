from io import StringIO

import pytest
from rich.console import Console

from agentrl.obs import progress
from agentrl.obs.progress import EpisodeProgress


def test_lines_when_the_output_is_not_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(float(second) for second in range(0, 1000, 4))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    text = StringIO()
    with EpisodeProgress(Console(file=text, width=100), 6) as count:
        count.begin()
        for _ in range(6):
            count.add()
    lines = [line.split(" ", 2)[2] for line in text.getvalue().splitlines()]
    assert lines == ["evaluating: 6 episodes", "evaluating: 3/6 episodes, about 0m12s left"]
    assert count.done == 6


def test_a_bar_in_a_terminal() -> None:
    text = StringIO()
    with EpisodeProgress(Console(file=text, width=120, force_terminal=True), 3) as count:
        count.begin()
        count.add()
        count.add()
    assert "evaluating" in text.getvalue()
    assert "2/3" in text.getvalue()
