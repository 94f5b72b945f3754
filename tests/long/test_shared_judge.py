"""A run whose judge has the learner's and the policy's place in turn, on a CPU: its engine is killed, and so is the run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.integration.shared_runs import Running, gone, metrics

pytestmark = pytest.mark.long

PROMPTS, SAMPLES, STEPS = 4, 3, 4
JUDGE = "{model: python-math-warm, pattern: '(\\d)', scale: [0, 9], max_new_tokens: 48, temperature: 1.0, tries: 20}"


def start(folder: Path, *settings: str, resume: bool = False) -> Running:
    if resume:
        return Running("train", "--resume", "run.dir=run", cwd=folder)
    (folder / "train.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"Who was born in place {number}?"}) for number in range(16))
    )
    return Running(
        "train", "--env", "single_turn", "data.path=train.jsonl", "model.path=multihop-warm", "reward=judge",
        f"reward.judge={JUDGE}", "placement.mode=colocate", "weights.transport=disk", "sampler.embedded.context=2048",
        "sampler.embedded.threads=1", "sampler.health_interval_s=0.5", "learner.threads=1", "run.dir=run", "run.seed=0",
        f"rollout.batch_size={PROMPTS}", f"rollout.n_samples_per_prompt={SAMPLES}", "rollout.max_tokens=256",
        f"train.steps={STEPS}", "train.save_every=1", "train.eval_first=false", "train.eval_every=0", "obs.progress=plain",
        "obs.tensorboard=false", *settings, cwd=folder,
    )  # fmt: skip


def judge_engine(run: Running, folder: Path) -> psutil.Process:
    """The process that writes the log of the judge's engine."""
    log = str(folder / "run" / "logs" / "judge-0" / "engine-0.log")
    (process,) = [child for child in run.descendants() if log in {file.path for file in child.open_files()}]
    return process


def steps_done(folder: Path) -> list[int]:
    return [int(row["step"]) for row in metrics(folder / "run") if "train/reward" in row]


def check(folder: Path) -> None:
    """Each episode of each step is there once, and has a reward of the judge."""
    assert steps_done(folder) == list(range(1, STEPS + 1))
    for step in range(1, STEPS + 1):
        lines = (folder / "run" / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
        rollouts = [json.loads(line) for line in lines]
        assert len({rollout["rollout_id"] for rollout in rollouts}) == len(rollouts) == PROMPTS * SAMPLES
        assert any(rollout["metrics"]["judge/calls"] for rollout in rollouts), "an empty answer needs no call"
        failures = [rollout["failure"]["error"] for rollout in rollouts if rollout["failure"] is not None]
        assert {*failures} <= {"JudgeError"}, "a text without a score, and no lost engine"
        assert len(failures) < len(rollouts) / 2
    rows = [row for row in metrics(folder / "run") if "train/reward" in row and not row.get("rollout/from_journal")]
    assert all(row["time/judging_s"] > 0 and row["time/wake_s"] > 0 for row in rows)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_of_a_judge_is_started_again_in_its_turn(tmp_path: Path, fault: signal.Signals) -> None:
    run = start(tmp_path, "sampler.stall_timeout_s=3")
    try:
        run.wait_for(lambda: 1 in steps_done(tmp_path))
        os.kill(judge_engine(run, tmp_path).pid, fault)
        children = run.descendants()
        assert run.finish(300) == 0, run.output()
        assert gone(children) == []
        assert "engine-0 was restarted (1 of" in run.output()
    finally:
        run.end()
    check(tmp_path)


def test_a_run_that_is_killed_is_resumed_with_its_judge(tmp_path: Path) -> None:
    run = start(tmp_path)
    try:
        run.wait_for(lambda: 2 in steps_done(tmp_path))
        children = run.descendants()
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
        assert gone(children, timeout=30) == []
    finally:
        run.end()
    run = start(tmp_path, resume=True)
    try:
        assert run.finish(300) == 0, run.output()
    finally:
        run.end()
    check(tmp_path)
