"""The comparison of two runs finds every kind of difference."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.structure.same_results import compare_runs, main

STEP = {"step": 1, "train/loss": 0.5, "train/grad_norm": 1.25, "train/reward": 0.5, "time/step_s": 3.0}
ROLLOUT = {"rollout_id": "1/0/0", "reward": 1.0, "seconds": 0.25, "rows": [{"token_ids": [1, 2], "logprobs": [-0.5]}]}
WEIGHTS = {"head": np.ones((2, 2), np.float32)}


def write(
    run: Path,
    metrics: dict[str, Any] | None = None,
    rollout: dict[str, Any] | None = None,
    weights: dict[str, Any] | None = None,
    advantage: float = 0.5,
) -> Path:
    model = run / "checkpoints" / "step_000001" / "model"
    for folder in (model, run / "rollouts"):
        folder.mkdir(parents=True)
    lines = [{"step": 0, "eval/reward": 0.25}, STEP | (metrics or {})]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "rollouts" / "step_000001.jsonl").write_text(json.dumps(ROLLOUT | (rollout or {})) + "\n")
    (run / "rollouts" / "step_000001.advantages.json").write_text(json.dumps({"1/0/0": advantage}))
    save_file(WEIGHTS | (weights or {}), model / "model.safetensors")
    return run


def test_runs_that_differ_in_times_and_names_of_metrics_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a", {"train/old": 1.0})
    b = write(tmp_path / "b", {"time/step_s": 4.0, "train/new": 1.0}, {"seconds": 0.5})
    assert compare_runs(a, b) == ([], [f"train/new only in {b}", f"train/old only in {a}"])
    assert main([str(a), str(b)]) == 0
    assert "are equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"metrics": {"train/loss": 0.5000001}}, "metrics of step 1: train/loss is 0.5 and 0.5000001"),
        ({"rollout": {"reward": 0.0}}, "step_000001.jsonl: rollout 1/0/0 differs"),
        ({"rollout": {"rollout_id": "1/0/1"}}, "step_000001.jsonl: rollout 1/0/1 is only in the second run"),
        ({"advantage": 0.25}, "step_000001.advantages.json differs"),
        ({"weights": {"head": -np.zeros((2, 2), np.float32)}}, "weights of step_000001: head differs"),
        ({"weights": {"tail": np.ones(1)}}, "weights of step_000001: tail is only in the second run"),
    ],
)
def test_every_difference_is_found(tmp_path: Path, changed: dict[str, Any], difference: str) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", **changed)
    assert difference in compare_runs(a, b)[0]
    assert main([str(a), str(b)]) == 1


def test_the_sign_of_zero_is_a_difference(tmp_path: Path) -> None:
    a = write(tmp_path / "a", weights={"head": np.zeros(2, np.float32)})
    b = write(tmp_path / "b", weights={"head": -np.zeros(2, np.float32)})
    assert compare_runs(a, b)[0] == ["weights of step_000001: head differs"]


def test_a_run_without_a_loss_or_a_step_is_different(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b")
    step = {key: value for key, value in STEP.items() if key != "train/loss"}
    (b / "metrics.jsonl").write_text(json.dumps({"step": 0, "eval/reward": 0.25}) + "\n" + json.dumps(step) + "\n")
    assert compare_runs(a, b)[0] == ["metrics of step 1: no train/loss"]
    (b / "metrics.jsonl").write_text(json.dumps({"step": 0, "eval/reward": 0.25}) + "\n")
    assert compare_runs(a, b)[0] == ["metrics: 2 and 1 lines"]
