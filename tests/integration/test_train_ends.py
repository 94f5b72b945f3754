"""Runs of the main job that something ends: a batch system, and a tool server that dies."""

import contextlib
import json
import signal
from pathlib import Path

import preloaded
import psutil
import pytest
from command_words import command_words
from shared_runs import IN_PROCESS_LEARNER, SMALL, Running, Services, gone, metrics

pytestmark = pytest.mark.slow

ENDLESS = [
    "train", "--env", "search_r1", *SMALL, "run.dir=run", "train.steps=200", "train.save_every=0",
    "train.eval_first=false", "rollout.batch_size=4", "rollout.n_samples_per_prompt=4",
]  # fmt: skip
"""A run of short steps that something ends."""


def test_a_batch_system_ends_a_run_as_ctrl_c_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm and systemd signal every process of a run, and more than once."""
    monkeypatch.delenv(preloaded.WORKERS)  # its learner is to be among them
    run, stop = Running(*ENDLESS, cwd=tmp_path), signal.SIGTERM
    try:
        run.wait_for(lambda: len([row for row in metrics(tmp_path / "run") if "train/reward" in row]) >= 1)
        children = run.descendants()
        assert "ray::LearnerActor" in {child.name() for child in children}
        for _ in range(2):
            run.send(stop)
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.send_signal(stop)
        assert run.finish() == 1, run.output()
        assert gone(children) == []
        output = run.output()
    finally:
        run.end()
    assert f"{stop.name}: " in output, "acknowledged"
    assert "--resume run.dir=run" in output.splitlines()[-1]
    assert "***" not in output, "no stack dump"
    assert "Traceback" not in output
    state = json.loads(next((tmp_path / "run" / "checkpoints").glob("step_*/state.json")).read_text())
    assert state["step"] == max(row["step"] for row in metrics(tmp_path / "run"))


@pytest.mark.long
def test_a_tool_server_that_dies_is_started_again_or_stops_the_run_with_nothing_lost(
    tmp_path: Path, services: Services
) -> None:
    engine = f"sampler.url={services.engine()}"
    run = Running(*ENDLESS, engine, "tools.search.max_restarts=1", cwd=tmp_path, target=IN_PROCESS_LEARNER, forks=False)

    def trained(count: int) -> bool:
        return len([row for row in metrics(tmp_path / "run") if "train/reward" in row]) >= count

    def servers() -> list[psutil.Process]:
        return [child for child in run.descendants() if {"tools", "serve", "search"} <= set(command_words(child))]

    try:
        run.wait_for(lambda: trained(1))
        [server] = servers()
        server.kill()
        server.wait()
        run.wait_for(lambda: len(servers()) == 1)
        count = len(metrics(tmp_path / "run"))
        run.wait_for(lambda: trained(count + 2))
        servers()[0].kill()
        assert run.finish() == 1
        assert "tools.search.max_restarts=1" in run.output()
        assert "resume it with: agentrl train --resume run.dir=run" in run.output()
    finally:
        run.end()
    state = json.loads(next((tmp_path / "run" / "checkpoints").glob("step_*/state.json")).read_text())
    steps = [row["step"] for row in metrics(tmp_path / "run") if "train/reward" in row]
    assert state["step"] == max(steps)
