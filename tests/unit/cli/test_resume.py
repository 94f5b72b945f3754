"""``agentrl train --resume``: the run's own configuration, settings on top, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from agentrl.cli.main import build_parser, main
from agentrl.cli.train import Loaded, load_run
from agentrl.config.saved import save_config
from agentrl.core.errors import ConfigError
from agentrl.learner.random_states import random_states, states_to_json
from agentrl.runtime.run_lock import locked

OVERRIDES = [
    "run.seed=7",
    "learner.optimizer.lr=1e-5",
    "learner.optimizer.warmup_steps=4",
    "learner.optimizer.weight_decay=0.1",
    "algo.kl_coef=0.001",
    "rollout.n_samples_per_prompt=4",
    "rollout.batch_size=4",
    "train.steps=9",
    "env.options.topk=3",
    "tools.search.options.client.token=t0k3n",
]


def loaded(*words: str) -> Loaded:
    return load_run(build_parser("train").parse_args(["train", *words]))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of ``--env search_r1`` and `OVERRIDES`, with a checkpoint, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/search_r1-20260101-000000")
    (folder / "checkpoints" / "step_000002").mkdir(parents=True)
    (folder / "checkpoints" / "step_000002" / "state.json").write_text(json.dumps({"step": 2, "seed": 7}))
    save_config(loaded("--env", "search_r1", *OVERRIDES).config, folder)
    return folder


@pytest.mark.parametrize("named", [False, True])
def test_resume_alone_is_the_configuration_of_the_start(run: Path, named: bool) -> None:
    found = loaded("--resume", *([f"run.dir={run}"] if named else []))
    started = loaded("--env", "search_r1", *OVERRIDES).config
    assert found.resumed == run
    assert found.config.model_copy(update={"run": started.run}) == started
    assert found.notes == (f"configuration {run / 'config.yaml'}",), "no difference to say"


def test_settings_and_files_on_top_are_said(run: Path, tmp_path: Path) -> None:
    (tmp_path / "lr.yaml").write_text("learner: {optimizer: {lr: 2.0e-5}}\n")
    found = loaded("--resume", "--config", "lr.yaml", "train.steps=40", "tools.search.options.client.token=other")
    assert found.notes[1:] == (
        "tools.search.options.client.token: <redacted> → <redacted>",
        "learner.optimizer.lr: 1.0e-05 → 2.0e-05",
        "train.steps: 9 → 40",
    )
    assert (found.config.train.steps, found.config.learner.optimizer.lr, found.config.run.seed) == (40, 2e-5, 7)
    assert found.config.tools["search"].options["client"] == {"token": "other"}


@pytest.mark.parametrize(
    ("setting", "before"),
    [
        ("run.seed=8", "7"),
        ("env.name=single_turn", "search_r1"),
        ("tasks.name=other", "multihop"),
        ("tasks.options={scale: 0.1}", "null"),
        ("tasks.train_split=eval", "train"),
        ("data.limit=5", "null"),
        ("model.path=elsewhere", "multihop-warm"),
        ("model.warm_start=search_r1/sft_warm", "null"),
    ],
)
def test_another_run_is_refused_with_the_key(run: Path, setting: str, before: str) -> None:
    key = setting.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"(?m)^{key}\S*=.*: the run in {run} has {before}; leave out {key}"):
        loaded("--resume", setting)


def test_another_environment_by_option_is_refused_too(run: Path) -> None:
    with pytest.raises(ConfigError, match="no run of single_turn under"):
        loaded("--resume", "--env", "single_turn")
    with pytest.raises(ConfigError, match=r"env\.name=single_turn: the run in"):
        loaded("--resume", "--env", "single_turn", f"run.dir={run}")
    assert loaded("--resume", "--env", "search_r1").resumed == run


def test_a_dry_run_shows_the_run_and_the_command_line_as_origins(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", "--dry-run", "train.steps=40", "algo.kl_coef=0"]) == 0
    shown = capsys.readouterr()
    assert yaml.safe_load(shown.out)["learner"]["optimizer"]["lr"] == 1e-5
    assert f"# {run / 'config.yaml'}" in shown.out
    assert "t0k3n" not in shown.out + shown.err
    assert "train.steps: 9 → 40" in shown.err


def test_a_run_that_goes_on_already_is_refused_with_its_process(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with locked(run):
        assert main(["train", "--resume", "algo.kl_coef=0"]) == 2
    assert "is in use by process" in capsys.readouterr().err


def test_a_seed_edited_in_the_configuration_of_the_run_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("seed: 7\n", "seed: 8\n", 1))
    state = run / "checkpoints" / "step_000002" / "state.json"
    state.write_text(json.dumps({"step": 2, "seed": 7, "random": states_to_json(random_states())}))
    assert main(["train", "--resume", "algo.kl_coef=0"]) == 2
    assert "run.seed=8" in capsys.readouterr().err


def test_a_mistyped_folder_starts_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", "run.dir=runs/none"]) == 2
    assert str(run) in capsys.readouterr().err
    assert not Path("runs/none").exists()
