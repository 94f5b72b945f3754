"""A run with a warm start through the command line: stopped in it, begun anew, gone on from it."""

from pathlib import Path

import pytest
import yaml
from shared_runs import SMALL, Running, Services, metrics

SFT = {
    "tasks": {"name": "multihop", "options": {"scale": 0.1, "hops": [1]}},
    "env": {"options": {"topk": 2}},
    "learner": {"device": "cpu", "threads": 1},
    "sft": {"batch_size": 2, "workers": 0},
    "obs": {"tensorboard": False},
}
TINY = ["rollout.batch_size=2", "rollout.n_samples_per_prompt=4", "eval.size=6", "train.save_every=0", "run.dir=run"]


@pytest.mark.long
def test_stopped_in_its_warm_start_a_run_begins_it_anew_and_trains_what_came_of_it(
    tmp_path: Path, services: Services
) -> None:
    (tmp_path / "warm.yaml").write_text(yaml.safe_dump(SFT))
    words = ["train", "--env", "search_r1", *SMALL, *TINY, "algo.kl_coef=0.001", "model.warm_start=warm.yaml"]
    run = Running(*words, "model.warm_start_options={sft: {steps: 1000000}}", cwd=tmp_path)
    try:
        run.wait_for(lambda: bool(metrics(tmp_path / "run" / "warm_start")))
        run.interrupt()
        assert "--resume" in run.output()
    finally:
        run.end()
    short = "model.warm_start_options={sft: {steps: 2}}"
    done = services.agentrl(*words, short, "train.steps=1", "--resume", cwd=tmp_path, search=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2/2  loss" in done.stdout
    folder = tmp_path / "run"
    assert [row["step"] for row in metrics(folder) if "train/reward" in row] == [1]
    assert 0 <= metrics(folder)[1]["time/tools_share"] < 1
    reference = yaml.safe_load((folder / "config.yaml").read_text())["algo"]["reference"]
    assert reference == str(folder.resolve() / "warm_start" / "model"), "of the KL term: where training began"
    stamp = (folder / "warm_start" / "finished").stat().st_mtime_ns
    done = services.agentrl(*words, short, "train.steps=2", "--resume", cwd=tmp_path, search=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warm start" not in done.stdout, "it goes on from its checkpoint"
    assert (folder / "warm_start" / "finished").stat().st_mtime_ns == stamp
    assert [row["step"] for row in metrics(folder) if "train/reward" in row] == [1, 2]
