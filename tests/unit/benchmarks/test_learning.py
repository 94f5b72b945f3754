"""``agentrl bench learning``: bands, rows, settings of its runs, and tasks that a trainer does not play."""

from pathlib import Path

import pytest
from rich.console import Console

from agentrl.cli.main import build_parser
from agentrl.core.errors import ConfigError, UnknownNameError
from benchmarks.commands import learning
from benchmarks.learning_suite import (
    POLICIES,
    TASKS,
    TRAINERS,
    Band,
    Result,
    band_key,
    read_bands,
)

RESULT = Result("reverse_text", "small", "agentrl", 1, 0.61, 0.95, 2.9, 1.4, 40)


def parse(*words: str):
    return build_parser("bench").parse_args(["bench", "learning", *words])


@pytest.mark.parametrize(
    ("score", "place"), [(0.899, "below"), (0.9, "inside"), (0.95, "inside"), (0.98, "inside"), (0.981, "above")]
)
def test_a_score_is_inside_its_band_or_not(score: float, place: str) -> None:
    assert Band(0.9, 0.98).place(score) == place


def test_a_result_names_its_band_or_that_there_is_none(tmp_path: Path) -> None:
    file = tmp_path / "bands.yaml"
    file.write_text("reverse_text: {small: {agentrl: [0.96, 1.0]}}")
    assert RESULT.place(read_bands(file)) == "below 0.96 to 1.00"
    assert RESULT.place({}) == "no band"


def test_shipped_bands_are_of_the_suite() -> None:
    bands = read_bands()
    assert bands
    keys = {band_key(task, policy, trainer) for task in TASKS for policy in POLICIES for trainer in TRAINERS}
    assert {*bands} <= keys
    assert all(0 <= band.low < band.high <= 1 for band in bands.values())


def test_the_command_prints_a_row_and_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int, str]] = []

    def train(arguments, task, seed, console):
        config = learning.resolve_task(arguments, task, seed)
        made.append((task, config.run.seed, str(config.run.dir)))
        assert config.train.steps == 3
        return RESULT

    monkeypatch.setattr(learning, "train_task", train)
    console = Console(record=True, width=200)
    out = tmp_path / "out"
    (out / "init").mkdir(parents=True)
    (out / "init" / "config.json").write_text("{}")  # the policy is there
    arguments = parse("reverse_text", "calculator", "train.steps=3", "--seed", "1", "--seed", "2", f"--out={out}")
    learning.run(arguments, console)
    assert made == [
        (task, seed, str(out / f"{task}-small-{seed}")) for task in ("reverse_text", "calculator") for seed in (1, 2)
    ]
    text = console.export_text()
    assert "task reverse_text, policy small, trainer agentrl, seed 1, before 0.610, after 0.950, minutes 2.9" in text
    assert (out / "results.jsonl").read_text().count('"final": 0.95') == 4
    assert len(list((out / "init").iterdir())) == 1, "and is not written again"


def test_tasks_that_do_not_exist_or_that_trl_does_not_play_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'reverse_text'"):
        learning.run(parse("revers_text", f"--out={tmp_path}"), Console())
    with pytest.raises(ConfigError, match="wordle --trainer trl: TRL plays reverse_text"):
        learning.run(parse("wordle", "--trainer", "trl", f"--out={tmp_path}"), Console())
