"""Runs of the main job that something ends: Ctrl-C, and a tool server that dies."""

import json
from pathlib import Path

from shared_runs import IN_PROCESS_LEARNER, SMALL, Running, Services, metrics

ENDLESS = [
    "train", "--env", "search_r1", *SMALL, "run.dir=run", "train.steps=200", "train.save_every=0",
    "train.eval_first=false", "rollout.batch_size=4", "rollout.n_samples_per_prompt=4",
]  # fmt: skip
"""A run of short steps that something ends."""


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    run = Running(*ENDLESS, cwd=tmp_path)
    try:
        run.wait_for(lambda: len([row for row in metrics(tmp_path / "run") if "train/reward" in row]) >= 1)
        run.interrupt()
        assert "--resume" in run.output()
    finally:
        run.end()
    state = json.loads(next((tmp_path / "run" / "checkpoints").glob("step_*/state.json")).read_text())
    assert state["step"] == max(row["step"] for row in metrics(tmp_path / "run"))


def test_a_tool_server_that_dies_stops_the_run_with_nothing_lost(tmp_path: Path, services: Services) -> None:
    engine = f"sampler.url={services.engine()}"
    run = Running(*ENDLESS, engine, cwd=tmp_path, target=IN_PROCESS_LEARNER, forks=False)
    try:
        run.wait_for(lambda: len([row for row in metrics(tmp_path / "run") if "train/reward" in row]) >= 1)
        [server] = [child for child in run.descendants() if {"tools", "serve", "search"} <= set(child.cmdline())]
        server.kill()
        assert run.finish() == 1
        assert "search" in run.output()
    finally:
        run.end()
    state = json.loads(next((tmp_path / "run" / "checkpoints").glob("step_*/state.json")).read_text())
    steps = [row["step"] for row in metrics(tmp_path / "run") if "train/reward" in row]
    assert state["step"] == max(steps)
