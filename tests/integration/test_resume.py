"""A run that is killed and resumed with ``--resume`` alone equals the one that was not: configuration, tasks, learning rates."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from shared_runs import IN_PROCESS_LEARNER, ONE_THREAD, Running, Services, metrics

from agentrl.config.layers import differences
from agentrl.config.load import validate

STEPS = 4
OVERRIDES = [
    "run.seed=7", "learner.optimizer.lr=1e-4", "learner.optimizer.warmup_steps=8", "learner.optimizer.weight_decay=0.1",
    "learner.optimizer.betas=[0.8, 0.9]", "algo.entropy_coef=0.001", "rollout.batch_size=2", "rollout.max_turns=3",
    "rollout.n_samples_per_prompt=2", f"train.steps={STEPS}", "train.eval_first=false", "train.save_every=2",
    "eval.size=2", "obs.tensorboard=false", "learner.precision=float32",
]  # fmt: skip
"""More than ten settings, none of which is given again at the resume."""


@dataclass(frozen=True)
class Outcome:
    """What a run leaves behind."""

    config: dict[str, object]
    tasks: dict[str, str]
    """The task of each rollout."""
    rates: list[float]
    """The learning rate of each step."""


def outcome(folder: Path) -> Outcome:
    lines = [line for file in sorted((folder / "rollouts").glob("*.jsonl")) for line in file.read_text().splitlines()]
    rollouts = [json.loads(line) for line in lines]
    rates = [row["train/lr"] for row in metrics(folder) if "train/lr" in row]
    config = yaml.safe_load((folder / "config.yaml").read_text())
    return Outcome(config, {one["rollout_id"]: one["prompt_id"] for one in rollouts}, rates)


def start(cwd: Path, services: Services, *words: str) -> Running:
    """Start a run in a new folder under ``runs/``."""
    cwd.mkdir()
    joined = [f"sampler.url={services.engine()}", f"tools.search.url={services.search()}", *ONE_THREAD]
    return Running("train", "--env", "search_r1", *OVERRIDES, *joined, *words, cwd=cwd, target=IN_PROCESS_LEARNER)


@pytest.fixture(scope="module")
def unkilled(services: Services, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    cwd = tmp_path_factory.mktemp("unkilled") / "cwd"
    run = start(cwd, services)
    try:
        assert run.finish() == 0, run.output()
    finally:
        run.end()
    [folder] = (cwd / "runs").iterdir()
    return outcome(folder)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_resumed_equals_the_one_that_was_not_ended(
    unkilled: Outcome, services: Services, tmp_path: Path, number: signal.Signals
) -> None:
    cwd = tmp_path / "cwd"
    run = start(cwd, services)
    try:
        run.wait_for(lambda: any(cwd.glob("runs/*/checkpoints/step_000002")))
        run.send(number)
        assert run.finish() != 0
        words = run.output()
    finally:
        run.end()
    [folder] = (cwd / "runs").iterdir()
    ended = max(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_??????"))
    assert 2 <= ended < STEPS, "it has steps left to take"
    if number is signal.SIGTERM:
        assert f"agentrl train --resume run.dir={folder.relative_to(cwd)}" in words
    services.engine()  # has no request of the killed run any more
    run = Running("train", "--resume", cwd=cwd, target=IN_PROCESS_LEARNER)
    try:
        assert run.finish() == 0, run.output()
        assert f"going on from step_{ended:06d}" in run.output()
    finally:
        run.end()
    resumed = outcome(folder)
    assert list(map(str, differences(validate(unkilled.config), validate(resumed.config)))) == []
    assert resumed == unkilled
    assert len(resumed.tasks) == STEPS * 4
    assert len(set(resumed.rates)) == STEPS
    print(
        f"{number.name} after step {ended} of {STEPS}, {len(OVERRIDES)} overrides: 0 keys differ, tasks of "
        f"{len(resumed.tasks)} rollouts and {len(resumed.rates)} learning rates equal"
    )
