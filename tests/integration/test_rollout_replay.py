"""Sampling to a file without training, and training on the file without sampling, through the command line."""

from pathlib import Path

import pytest
from shared_runs import IN_PROCESS_LEARNER, ONE_THREAD, Running, Services, agentrl, here, metrics

from agentrl.obs.rollouts import read_rollouts

pytestmark = pytest.mark.slow

TINY = [*ONE_THREAD, "rollout.batch_size=4", "rollout.n_samples_per_prompt=4"]


@pytest.mark.long
def test_samples_in_parquet_are_trained_on(tmp_path: Path, services: Services) -> None:
    sample = ["--env", "search_r1", "--out", "samples.parquet", "--tasks", "6", *TINY]
    done = services.agentrl("rollout", *sample, cwd=tmp_path, search=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reward" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"samples.parquet", "samples.config.yaml"}
    rollouts = read_rollouts(tmp_path / "samples.parquet")
    assert len(rollouts) == 24
    assert len({rollout.prompt_id for rollout in rollouts}) == 6
    assert len({rollout.rollout_id for rollout in rollouts}) == 24
    assert all(rollout.label and rollout.sampled_tokens for rollout in rollouts)
    words = ["--replay", "samples.parquet", *TINY, "run.dir=run", "train.steps=1", "obs.progress=plain"]
    done = agentrl("train", *words, cwd=tmp_path, target=IN_PROCESS_LEARNER)
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = metrics(tmp_path / "run")
    assert row["train/trained_tokens"] > 0
    assert row["train/grad_norm"] > 0
    assert abs(row["train/ratio_mean"] - 1) < 0.1, "the learner agrees with the engine on what was sampled"
    assert (tmp_path / "run" / "checkpoints" / "step_000001" / "model" / "config.json").is_file()
    assert not (tmp_path / "run" / "logs" / "engine-0.log").exists(), "nothing samples"
    again = here("rollout", "--env", "search_r1", "--out", "samples.parquet", cwd=tmp_path)
    assert (again.returncode, "exists" in again.stderr) == (2, True)


def test_ctrl_c_keeps_what_was_sampled(tmp_path: Path) -> None:
    words = ["--env", "search_r1", "--out", "samples.jsonl", "--split", "train", "--tasks", "2000"]
    run = Running("rollout", *words, *TINY, cwd=tmp_path)
    samples = tmp_path / "samples.jsonl"
    try:
        run.wait_for(lambda: samples.exists() and samples.read_bytes().count(b"\n") > 16)
        run.interrupt()
        kept_rollouts = len(read_rollouts(samples))
        assert 16 < kept_rollouts < 8000
        assert f"{kept_rollouts} of 8000 rollouts are in samples.jsonl" in run.output()
    finally:
        run.end()
