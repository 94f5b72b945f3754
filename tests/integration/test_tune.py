"""``agentrl tune`` on small steps of the main job, until Ctrl-C."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from shared_runs import ONE_THREAD, Running, Services, gone

from agentrl.config.load import read_yaml


@pytest.mark.long
def test_trials_until_an_interrupt(services: Services, tmp_path: Path) -> None:
    joined = [f"sampler.url={services.engine()}", f"tools.search.url={services.search()}"]
    small = [
        "rollout.batch_size=2",
        "rollout.n_samples_per_prompt=2",
        "rollout.concurrency=2",
        "batch.tokens_per_micro=2048",
    ]
    words = ["--config", "search_r1/cpu", "--minutes", "60", "--steps", "2", *joined, *small, *ONE_THREAD]
    running = Running("tune", *words, cwd=tmp_path)
    try:
        running.wait_for(lambda: "start again: repeat" in running.output())
        processes = running.descendants()
        assert len([*tmp_path.glob("runs/tune-*/run-*")]) == 2, "of the start and of its repetition, until the end"
        running.send(signal.SIGINT)
        code, output = running.finish(), running.output()
    finally:
        running.end()
    assert code == 0, output
    assert not [*tmp_path.glob("runs/*")]
    assert gone(processes) == []
    for line in ("start: start, ", "start again: repeat, ", "interrupted: what was found so far is written"):
        assert line in output
    assert set(read_yaml(tmp_path / "tuned.yaml")) <= {"rollout", "batch"}
    assert (tmp_path / "tuned.yaml").read_text().startswith("# agentrl tune --config search_r1/cpu sampler.url=")
