"""Strikes the engines of a run, and holds that it lost nothing."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import preloaded
import psutil
from shared_runs import Running, gone, metrics

SAMPLES = 4
"""Rollouts of a task."""
_log = logging.getLogger(__name__)


def whole_run(
    folder: Path,
    settings: Mapping[str, object],
    *,
    steps: int,
    prompts: int,
    strikes: Mapping[int, signal.Signals],
    fresh: bool = False,
    timeout_s: float = 400.0,
) -> list[dict[str, float]]:
    """Train, strike an engine amid the rollouts of some steps, and return the rows of all steps.

    Asserts that every step was taken, that each of its samples is there once, and that it has the weights of the step.

    Args:
        folder: where to run.
        settings: more keys.
        steps: to train.
        prompts: tasks of a step.
        strikes: by step, which signal its oldest engine gets.
        fresh: see `Running`; a GPU must not have been used before a fork.
        timeout_s: until a struck step runs, and from the last strike to the end.

    """
    words = {
        "run.dir": "run",
        "learner.threads": 1,
        "sampler.embedded.threads": 1,
        "obs.progress": "plain",
        "obs.tensorboard": "false",
        "train.steps": steps,
        "train.eval_first": "false",
        "train.eval_every": 0,
        "train.save_every": 0,
        "eval.size": 16,
        "rollout.batch_size": prompts,
        "rollout.n_samples_per_prompt": SAMPLES,
        **settings,
    }
    overrides = (f"{key}={value}" for key, value in words.items())
    # Not --env search_r1, whose settings depend on the machine.
    run = Running("train", "--config", "search_r1/cpu", *overrides, cwd=folder, fresh=fresh)

    def rolling(step: int) -> bool:
        """Some episodes of the step have ended, others have not."""
        file = folder / "run" / "rollouts" / f"step_{step:06d}.jsonl"
        return file.exists() and len(file.read_text().splitlines()) > 2

    try:
        for step, fault in strikes.items():
            _log.warning("waits for step %d", step)
            run.wait_for(lambda step=step: rolling(step), timeout=timeout_s)
            _log.warning("step %d: %s to an engine", step, fault.name)
            os.kill(engines(run)[0].pid, fault)
        children = run.descendants()
        assert run.finish(timeout_s) == 0, run.output()
        assert gone(children) == []
    finally:
        run.end()
    rows = [row for row in metrics(folder / "run") if "train/reward" in row]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert rows[-1]["rollout/engine_restarts"] == len(strikes)
    assert all(row["rollout/episodes"] == prompts * SAMPLES and row["rollout/dropped"] == 0 for row in rows)
    for step in range(1, steps + 1):
        check_rollouts(folder, step, prompts)
    return rows


def check_rollouts(folder: Path, step: int, prompts: int) -> None:
    """Each sample of a step is there once, and has the weights of the step."""
    lines = (folder / "run" / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    rollouts = [json.loads(line) for line in lines]
    expected = {f"{step}/{offset}/{sample}" for offset in range(prompts) for sample in range(SAMPLES)}
    assert len(rollouts) == len(expected)
    assert {rollout["rollout_id"] for rollout in rollouts} == expected
    versions = {version for record in rollouts for row in record["rows"] for version in row["versions"]}
    assert versions == {-1, step - 1}, "an engine that was started again has the weights of the step"


def engines(run: Running) -> list[psutil.Process]:
    """Return the servers of a run's engines, the oldest first."""
    servers = (preloaded.process_name(preloaded.ENGINE), preloaded.ENGINE, "sglang.launch_server")
    processes = [child for child in run.descendants() if _module(child) in servers]
    return sorted(processes, key=lambda process: process.create_time())


def _module(process: psutil.Process) -> str:
    """Return what an interpreter was started with by ``-m``, else the process's name, which of a fork is that."""
    try:
        words, name = process.cmdline(), process.name()
    except psutil.Error:
        return ""
    return words[2] if words[1:2] == ["-m"] and len(words) > 2 else name
