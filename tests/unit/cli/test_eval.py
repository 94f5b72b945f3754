"""Which configuration and model ``agentrl eval`` takes, and what it refuses before anything is started."""

import argparse
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.cli import eval as command
from agentrl.cli.main import main
from agentrl.config.load import dump, find_config, load_config
from agentrl.config.schema import Config
from agentrl.evaluation.checkpoint_model import checkpoint_model, find_run_folder


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """What `agentrl train` leaves behind, weights left out."""
    folder = tmp_path / "run"
    model = folder / "checkpoints" / "step_000007" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model.parent / "state.json").write_text("{}")
    settings = ["eval.size=7", "eval.sets.a.n_samples=3"]
    settings += ["sampler.port=1234", "sampler.url=http://x:1", "tools.search.port=99"]
    (folder / "config.yaml").write_text(dump(load_config(find_config("search_r1/cpu"), settings)))
    return folder


def resolved(*words: str) -> tuple[Config, str]:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    text = StringIO()
    return command.checkpoint_config(parser.parse_args(words), Console(file=text, width=200)), text.getvalue()


@pytest.mark.parametrize("inner", ["", "checkpoints/step_000007", "checkpoints/step_000007/model"])
def test_a_run_brings_its_configuration(run_folder: Path, inner: str) -> None:
    config, output = resolved("--checkpoint", str(run_folder / inner), "eval.temperature=0")
    assert (config.eval.size, config.eval.group_by, config.env.options["topk"]) == (7, "hops", 2)
    assert config.eval.named_sets()["a"].temperature == 0, "a set without a temperature still follows eval's"
    assert Path(config.model.path) == run_folder / "checkpoints/step_000007/model"
    assert (config.sampler.url, config.sampler.port, config.tools["search"].port) == (None, 0, 0), (
        "the run may use them"
    )
    assert str(run_folder / "config.yaml") in output


@pytest.mark.parametrize("words", [("--env", "search_r1"), ("--config", "search_r1/cpu")])
def test_what_is_named_wins_over_the_runs_configuration(run_folder: Path, words: tuple[str, ...]) -> None:
    config, output = resolved("--checkpoint", str(run_folder), *words)
    assert config.eval.size == 300
    assert "config.yaml" not in output


def test_a_model_folder_is_no_run(run_folder: Path, tmp_path: Path) -> None:
    assert find_run_folder(str(tmp_path)) is None
    assert find_run_folder("multihop-warm") is None
    assert checkpoint_model("multihop-warm") == "multihop-warm"
    assert resolved()[0].model.path == "multihop-warm"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--checkpoint", "RUN", "sampler.url=http://localhost:1"), "sampler.url=http://localhost:1 with --checkpoint"),
        (("--json", "no/such/folder/x.json"), "no/such/folder"),
        (("--rollouts", "samples.txt"), ".parquet"),
        (("--rollouts", "step_000001.jsonl"), "step_000001.jsonl exists and is of no evaluation"),
        (("--rollouts", "step_000001.parquet"), "step_000001.jsonl exists and is of no evaluation"),
        (("eval.sets.a={split: train, path: x.jsonl}",), "eval.sets.a"),
        (("eval.sets.a.path=none.jsonl",), "none.jsonl"),
        (("eval.sets.a.split=evla",), "validation"),
        (("eval.sets.a.size=100000",), "eval.sets.a.size=100000"),
        (("eval.group_by=depth",), "eval.group_by=depth"),
    ],
)
def test_mistakes_exit_with_two_before_anything_starts(
    run_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(run_folder.parent)
    Path("samples.jsonl").write_text("of an earlier evaluation")
    Path("samples.eval.json").touch()
    Path("step_000001.jsonl").write_text("of a run")
    words = tuple(str(run_folder) if word == "RUN" else word for word in words)
    if "--rollouts" not in words:
        words += ("--rollouts", "samples.jsonl")
    assert main(("eval", *words)) == 2
    assert Path("samples.jsonl").read_text() == "of an earlier evaluation"
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_files_to_train_on_alone_are_nothing_to_evaluate_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text('{"prompt": "1+1?", "label": "2"}\n')
    words = ["--env", "single_turn", "data.path=train.jsonl", "data.label_key=label", "reward=exact_match"]
    assert main(("eval", *words)) == 2
    assert "data.eval_path" in capsys.readouterr().err
