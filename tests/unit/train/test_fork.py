"""Forks: a new run from another one's checkpoint; what it takes over, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.api.loading import Loaded
from agentrl.cli.main import build_parser
from agentrl.cli.train import load_run
from agentrl.config.layers import save_config
from agentrl.config.recorded import recorded_keys
from agentrl.core.checksums import check_checksums, write_checksums
from agentrl.core.errors import ConfigError
from agentrl.learner.checkpoints import latest_checkpoint, load_state, read_state
from agentrl.obs.metrics import read_metrics
from agentrl.obs.trackers import run_id
from agentrl.train.resume import check_resume

STATE = {
    "step": 2, "position": 8, "trained_ahead": [9], "spent_s": 5.0, "evaluated": 2, "score": 0.5,
    "source": {"data": {"next": 12}, "self_play": {"snapshots": [1]}},
}  # fmt: skip


def loaded(*words: str) -> Loaded:
    return load_run(build_parser("train").parse_args(["train", *words]))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of three steps with checkpoints of the second and the third."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/first")
    config = loaded("--env", "search_r1", "run.dir=runs/first", "train.steps=9", "learner.optimizer.lr=1e-5").config
    for step in (2, 3):
        checkpoint = folder / "checkpoints" / f"step_{step:06d}"
        (checkpoint / "model").mkdir(parents=True)
        (checkpoint / "model" / "weights").write_text(f"weights of step {step}")
        write_checksums(checkpoint, without=("state.json",))
        state = STATE | {"step": step, "keys": recorded_keys(config)}
        (checkpoint / "state.json").write_text(json.dumps(state))
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "train/reward": 0.5}}\n' for step in (1, 2, 3)))
    (folder / "league.jsonl").write_text('{"step": 1}\n')
    for step in (1, 2):
        (folder / "snapshots" / f"step_{step:06d}").mkdir(parents=True)
    (folder / "warm_start" / "model").mkdir(parents=True)
    save_config(config, folder)
    run_id(folder)
    return folder


def write(fork: Loaded, folder: Path) -> Path:
    """Make the folder of a fork, and return its checkpoint."""
    assert fork.fork is not None
    folder.mkdir()
    fork.fork.write(folder, fork.config, recorded_keys(fork.config))
    checkpoint = latest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    return checkpoint


def test_a_fork_is_a_run_that_resumes_from_the_others_checkpoint(run: Path, tmp_path: Path) -> None:
    fork = loaded("--fork", "runs/first@2", "train.steps=12")
    assert fork.notes == ("configuration runs/first/config.yaml", "train.steps: 9 → 12")
    assert (fork.config.run.dir, fork.config.learner.optimizer.lr, fork.resumed) == (None, 1e-5, None)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    checkpoint = write(fork, folder := tmp_path / "runs" / "second")
    assert checkpoint.name == "step_000002"
    check_checksums(checkpoint)
    assert (checkpoint / "model" / "weights").read_text() == "weights of step 2"
    assert load_state(checkpoint) == STATE | {
        "keys": recorded_keys(fork.config), "spent_s": 0.0
    }  # fmt: skip
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [1, 2]
    assert sorted(path.name for path in (folder / "snapshots").iterdir()) == ["step_000001"], "that its state names"
    assert (folder / "warm_start" / "model").is_dir()
    assert json.loads((folder / "fork.json").read_text()) == {"run": str(run.resolve()), "step": 2}
    assert "resumes from step 2" in check_resume(folder, recorded_keys(fork.config)), (
        "also if its start was interrupted"
    )
    (checkpoint / "state.json").unlink()
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_trackers_take_a_fork_for_another_run(run: Path, tmp_path: Path) -> None:
    write(loaded("--fork", "runs/first@latest"), folder := tmp_path / "second")
    assert run_id(folder) != run_id(run)


@pytest.mark.parametrize("setting", ["run.seed=7", "data.limit=3", "tasks.name=math_problems"])
def test_another_seed_or_task_order_begins_again(run: Path, tmp_path: Path, setting: str) -> None:
    fork = loaded("--fork", "runs/first@latest", setting)
    assert str(fork.fork).endswith("the order of the tasks begins again")
    checkpoint = write(fork, tmp_path / "second")
    state = read_state(checkpoint)
    assert (checkpoint.name, state["step"]) == ("step_000003", 3)
    assert (state["position"], state["trained_ahead"]) == (0, [])
    assert state["source"] == {"self_play": {"snapshots": [1]}}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs/first@7"], "has no checkpoint of step 7; it has those of the steps 2, 3"),
        (["runs/first"], "write RUN@STEP or RUN@latest"),
        (["runs/first@"], "write RUN@STEP"),
        (["runs/other@2"], "runs/other is no run, because it has no config.yaml"),
        (
            ["runs/first@2", "model.path=other"],
            "^model.path=other: the run in runs/first has multihop-warm, and a fork",
        ),
        (
            ["runs/first@2", "learner.optimizer.name=muon"],
            "^learner.optimizer.name=muon: the run in runs/first has adamw",
        ),
        (["runs/first@3", "train.steps=3"], "^train.steps=3: the checkpoint has 3 steps already"),
        (["runs/first@2", "--resume"], "--resume continues a run"),
    ],
)
def test_what_is_no_fork_is_refused(run: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded("--fork", *words)
