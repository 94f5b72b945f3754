"""A training run whose engines are killed and stopped in mid-rollout, through the command line."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from runs import Running, gone, metrics

pytestmark = pytest.mark.timeout(300)

STEPS, PROMPTS, SAMPLES = 3, 16, 4


def test_engines_killed_and_stopped_in_mid_rollout(tmp_path: Path) -> None:
    """The run ends with the same number of steps, every sample is there once, and the tokens say who sampled them."""
    settings = {
        "run.dir": "run",
        "obs.progress": "plain",
        "obs.tensorboard": "false",
        "train.steps": STEPS,
        "train.eval_first": "false",
        "train.eval_every": 0,
        "train.save_every": 0,
        "eval.size": 16,
        "rollout.batch_size": PROMPTS,
        "rollout.n_samples_per_prompt": SAMPLES,
        "sampler.engines": 2,
        "sampler.max_running": 16,
        "sampler.hang_s": 2,
        "sampler.health_every_s": 0.5,
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    run = Running("train", "--env", "search_r1", *words, cwd=tmp_path)

    def rolling(step: int) -> bool:
        """Some episodes of the step have ended, others have not."""
        file = tmp_path / "run" / "rollouts" / f"step_{step:06d}.jsonl"
        return file.exists() and len(file.read_text().splitlines()) > 2

    try:
        run.wait_for(lambda: rolling(1))
        os.kill(engines(run)[0].pid, signal.SIGKILL)
        run.wait_for(lambda: rolling(2))
        os.kill(engines(run)[-1].pid, signal.SIGSTOP)
        children = run.descendants()
        assert run.finish() == 0, run.output()
        assert gone(children) == []
    finally:
        run.end()
    rows = [row for row in metrics(tmp_path / "run") if "train/reward" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["rollout/engine_restarts"] == 2
    assert all(row["rollout/episodes"] == PROMPTS * SAMPLES and row["rollout/dropped"] == 0 for row in rows)
    assert all(0.2 < row["rollout/cache_hit"] < 1 for row in rows)
    wanted = {f"{offset}/{sample}" for offset in range(PROMPTS) for sample in range(SAMPLES)}
    for step in range(1, STEPS + 1):
        lines = (tmp_path / "run" / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
        rollouts = [json.loads(line) for line in lines]
        assert len(rollouts) == len(wanted)
        assert {rollout["rollout_id"] for rollout in rollouts} == {f"{step}/{name}" for name in wanted}
        versions = {version for one in rollouts for row in one["rows"] for version in row["versions"]}
        assert versions == {-1, step - 1}, "an engine that was started again has the weights of the step"


def engines(run: Running) -> list[psutil.Process]:
    return [child for child in run.descendants() if "agentrl.sampler.embedded" in child.cmdline()]
