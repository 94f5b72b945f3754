"""`agentrl.Run`: what a run has left, read from its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import agentrl
from agentrl.api.notebook import NotebookDisplay
from agentrl.api.run_page import curve
from agentrl.config.layers import save_config
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError
from agentrl.obs.rollouts import RolloutRecorder
from tests.unit.train.test_replay import groups


@pytest.fixture
def run(tmp_path: Path) -> agentrl.Run:
    config = Config.model_validate({"env": {"name": "search_r1"}, "train": {"steps": 4}})
    save_config(config, tmp_path)
    rows = [{"step": 1, "train/reward": 0.25}, {"step": 2, "train/reward": 0.5}, {"step": 2, "eval/reward": 0.75}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recorder = RolloutRecorder(tmp_path / "rollouts")
    for step, prompts in ((1, "ab"), (2, "c")):
        recorder.write(step, groups(*prompts))
        recorder.finish(step, {"a/0": 1.0})
    recorder.evaluation(2).write(groups("x"))
    for step in (1, 2):
        (checkpoint := tmp_path / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
        (checkpoint / "state.json").write_text(json.dumps({"score": 0.75 if step == 2 else None}))
    return agentrl.Run(tmp_path)


def test_metrics_are_a_table_by_step(run: agentrl.Run) -> None:
    pytest.importorskip("pandas")
    assert [row["step"] for row in run.rows()] == [1, 2, 2]
    frame = run.metrics
    assert list(frame.index) == [1, 2]
    assert frame.index.name == "step"
    assert list(frame.columns) == ["train/reward", "eval/reward"]
    assert frame.loc[2, "eval/reward"] == 0.75
    assert frame["eval/reward"].isna().tolist() == [True, False]


def test_rollouts_are_read_step_by_step(run: agentrl.Run) -> None:
    assert [rollout.rollout_id for rollout in run.rollouts(2)] == ["c/0", "c/1"]
    assert [rollout.prompt_id for rollout in run.rollouts()] == ["a", "b", "a", "b", "c", "c"]
    assert [rollout.prompt_id for rollout in run.rollouts(2, evaluation=True)] == ["x", "x"]
    assert run.advantages(1) == {"a/0": 1.0}
    with pytest.raises(ConfigError, match="no rollouts of step 9; it has those of the steps 1, 2"):
        next(run.rollouts(9))


def test_checkpoints_and_the_folder(run: agentrl.Run) -> None:
    folder = run.path / "checkpoints"
    assert run.checkpoints == [
        agentrl.Checkpoint(1, folder / "step_000001", None),
        agentrl.Checkpoint(2, folder / "step_000002", 0.75),
    ]
    assert (run.config.train.steps, run / "metrics.jsonl", run.error) == (4, run.path / "metrics.jsonl", None)
    (run / "end.json").write_text('{"error": "RunStopped", "message": "by <b>SIGINT</b>", "time": 1.0}')
    assert run.error == "RunStopped: by <b>SIGINT</b>"
    assert "RunStopped: by &lt;b&gt;SIGINT&lt;/b&gt;" in run._repr_html_()
    with pytest.raises(ConfigError, match=r"is no run, because it has no config\.yaml"):
        agentrl.Run(folder)
    with pytest.raises(ConfigError, match="has no checkpoint of step 7; it has those of: 1, 2"):
        run.evaluate(7)


def test_a_notebook_shows_progress_and_curve(run: agentrl.Run) -> None:
    page = run._repr_html_()
    assert "step 2/4" in page
    assert 'aria-label="learning curve"' in page
    assert "<td>0.75</td>" in page
    assert curve([], ["train/reward"]) == ""

    class Handle:
        shown: dict[str, str]

        def update(self, shown: dict[str, str], *, raw: bool) -> None:
            self.shown = shown

    display = NotebookDisplay(run.config, handle := Handle())
    display.log(1, {"train/reward": 0.5})
    assert handle.shown["text/plain"] == "step 1"
    assert "step 1/4" in handle.shown["text/html"]
