"""A run that is killed and resumed with ``--resume`` equals the one that was not.

Of runs that sample: configuration, tasks, learning rates. Of runs on recorded rollouts: losses, weights, optimizer and random
states, order of the data.
"""

from __future__ import annotations

import hashlib
import json
import random
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from killed_run import KILL_AT, MOMENTS
from safetensors.torch import load_file
from shared_runs import IN_PROCESS_LEARNER, ONE_THREAD, Running, Services, assert_phases_add_up, metrics
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import keystr, tree_flatten_with_path

from agentrl.config.layers import differences
from agentrl.config.load import validate
from agentrl.learner.checkpoints import complete_checkpoints, load_state
from agentrl.models.weight_checksum import tensor_checksum
from agentrl.obs.journal import read_journal

pytestmark = pytest.mark.slow

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
    return Outcome(config, {rollout["rollout_id"]: rollout["prompt_id"] for rollout in rollouts}, rates)


def start(cwd: Path, services: Services, *words: str) -> Running:
    """Start a run in a new folder under ``runs/``."""
    cwd.mkdir()
    joined = [f"sampler.url={services.engine()}", f"tools.search.url={services.search()}", *ONE_THREAD]
    joined.append("learner.save_hf=false")  # it resumes from weights that engines cannot load
    return Running("train", "--env", "search_r1", *OVERRIDES, *joined, *words, cwd=cwd, target=IN_PROCESS_LEARNER)


@pytest.fixture(scope="module")
def recorded(services: Services, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was not killed."""
    cwd = tmp_path_factory.mktemp("unkilled") / "cwd"
    run = start(cwd, services)
    try:
        assert run.finish() == 0, run.output()
    finally:
        run.end()
    [folder] = (cwd / "runs").iterdir()
    return folder


@pytest.fixture
def unkilled(recorded: Path) -> Outcome:
    return outcome(recorded)


@pytest.mark.long
def test_a_fork_without_changes_goes_on_as_the_run_did(recorded: Path, services: Services, tmp_path: Path) -> None:
    services.engine()
    run = Running(
        "train", "--fork", f"{recorded}@2", "run.dir=fork", "train.steps=3", cwd=tmp_path, target=IN_PROCESS_LEARNER
    )
    try:
        assert run.finish() == 0, run.output()
        assert f"fork of {recorded} after step 2" in run.output()
        assert f"train.steps: {STEPS} → 3" in run.output()
    finally:
        run.end()
    assert [row["step"] for row in metrics(tmp_path / "fork")] == [1, 2, 3, 3]
    original, fork = outcome(recorded), outcome(tmp_path / "fork")
    assert fork.rates == original.rates[:3]
    assert fork.tasks.items() <= original.tasks.items()
    assert len(fork.tasks) == 4, "those of step 3"


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
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
        assert f"resuming from step_{ended:06d}" in run.output()
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


def test_a_killed_asynchronous_run_trains_every_task_once(services: Services, tmp_path: Path) -> None:
    cwd = tmp_path / "cwd"
    evaluation = (
        "train.eval_every=2",
        "eval.background=true",
        "sampler.groups.eval={serves: evaluation, embedded: {slots: 8}}",
    )
    streaming = ("async.streaming=true", "batch.tokens_per_micro=256")
    run = start(cwd, services, "async.max_staleness=2", *streaming, *evaluation)
    try:
        run.wait_for(lambda: any(cwd.glob("runs/*/checkpoints/step_000002")))
        run.send(signal.SIGKILL)
        assert run.finish() != 0
    finally:
        run.end()
    services.engine()  # has no request of the killed run any more
    run = Running("train", "--resume", cwd=cwd, target=IN_PROCESS_LEARNER)
    try:
        assert run.finish() == 0, run.output()
    finally:
        run.end()
    [folder] = (cwd / "runs").iterdir()
    tasks = outcome(folder).tasks
    assert Counter(Counter(tasks.values()).values()) == {2: 2 * STEPS}, "2 tasks a step, 2 episodes a task"
    rows = metrics(folder)
    steps = [row for row in rows if "train/reward" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert max(row["async/staleness_max"] for row in steps) in (1, 2)
    sampled = [row for row in steps if "rollout/from_journal" not in row]
    assert all(0 < row["time/pause_s"] < row["time/sync_s"] for row in sampled)
    assert all(0 <= row["async/early_share"] <= 1 for row in steps)
    assert_phases_add_up(folder)
    state = read_journal(folder)
    assert state is not None
    assert (state.faults(), state.waiting, state.begins, state.trained) == ([], [], 2, 4)
    evaluations = [row for row in rows if "eval/exact_match" in row]
    assert [(row["step"], row["eval/lag_max"]) for row in evaluations] == [(2, 0), (4, 0)]
    assert {(row["engines/eval/live"], row["engines/eval/restarts"]) for row in evaluations} == {(1, 0)}
    assert [*(folder / "logs" / "eval").glob("engine-*.log")]


REPLAYED = [*OVERRIDES, *ONE_THREAD, "train.save_every=1", "train.keep=9", "train.steps_per_rollout=2", "run.dir=run"]
REPLAY = "killed_run:main"


def replay(cwd: Path, samples: Path, *words: str) -> tuple[int, str]:
    """Train on recorded rollouts, in the folder ``run`` of ``cwd``; returns exit status and output."""
    cwd.mkdir(exist_ok=True)
    run = Running("train", "--replay", str(samples), *words, cwd=cwd, target=REPLAY, forks=False)
    try:
        return run.finish(), run.output()
    finally:
        run.end()


def digest(value: Any) -> str:
    """Return a hash of tensors and plain values in dictionaries and sequences."""
    hasher = hashlib.sha256()
    for path, leaf in sorted((keystr(path), leaf) for path, leaf in tree_flatten_with_path(value)[0]):
        hasher.update(path.encode())
        hasher.update((tensor_checksum(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf)).encode())
    return hasher.hexdigest()


def learner_state(folder: Path) -> dict[str, Any]:
    """Return what a learner saved: its counters, and hashes of weights, optimizer and random states."""
    dcp_to_torch_save(folder / "optimizer", folder.parent / "optimizer.pt")
    states = {"optimizer": folder.parent / "optimizer.pt", "random": folder / "random" / "rank_00000.pt"}
    hashes = {name: digest(torch.load(path, weights_only=True)) for name, path in states.items()}
    weights = digest([load_file(path) for path in sorted((folder / "model").glob("*.safetensors"))])
    return json.loads((folder / "learner.json").read_text()) | hashes | {"weights": weights}


def trainer_state(checkpoint: Path) -> dict[str, Any]:
    """Return the trainer's counters and random states, without times."""
    state = load_state(checkpoint)
    return {name: value for name, value in state.items() if name != "spent_s"}


def batches(folder: Path) -> dict[int, list[str]]:
    """Return the batches of each optimizer step, in the order in which they were trained: more than one if it was repeated."""
    ids_by_step: dict[int, list[str]] = {}
    for line in (folder / "batches.jsonl").read_text().splitlines():
        ids_by_step.setdefault(json.loads(line)["step"], []).append(line)
    return ids_by_step


@pytest.fixture(scope="module")
def unkilled_replay(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of a run on recorded rollouts that was not killed."""
    cwd = tmp_path_factory.mktemp("unkilled_replay")
    status, output = replay(cwd, recorded, "--env", "search_r1", *REPLAYED)
    assert status == 0, output
    return cwd


@pytest.mark.parametrize(
    ("seed", "words"), [(0, []), pytest.param(1, ["learner.cpu_offload=optimizer"], marks=pytest.mark.long)]
)
def test_a_replay_that_is_killed_at_a_random_moment_equals_the_one_that_was_not(
    recorded: Path, unkilled_replay: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, words: list[str]
) -> None:
    moments = int((unkilled_replay / MOMENTS).read_text())
    moment = random.Random(seed).randrange(moments * 3 // 4)
    monkeypatch.setenv(KILL_AT, str(moment))
    status, output = replay(tmp_path, recorded, "--env", "search_r1", *REPLAYED, *words)
    assert status == -signal.SIGKILL, output
    folder, unkilled = tmp_path / "run", unkilled_replay / "run"
    trained = len(metrics(folder))
    checkpoints = complete_checkpoints(folder / "checkpoints")
    assert checkpoints, "the first was complete"
    at_kill = learner_state(checkpoints[-1])
    monkeypatch.delenv(KILL_AT)
    status, output = replay(tmp_path, recorded, "--resume", "run.dir=run")
    assert status == 0, output
    assert f"resuming from {checkpoints[-1].name}" in output

    # What was loaded is what the checkpoint has.
    loaded = learner_state(folder / "loaded")
    assert loaded == at_kill

    # From there on the run is that of the unkilled one.
    rows, expected_metrics = metrics(folder), metrics(unkilled)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row, expected in zip(rows, expected_metrics, strict=True):
        compared = {key: value for key, value in expected.items() if key.startswith(("train/", "batch/", "rollout/"))}
        assert "train/loss" in compared
        assert {key: row[key] for key in compared} == pytest.approx(compared, rel=0, abs=1e-6)
    assert {step: {*lines} for step, lines in batches(folder).items()} == {
        step: {*lines} for step, lines in batches(unkilled).items()
    }
    ours, theirs = (complete_checkpoints(run / "checkpoints")[-1] for run in (folder, unkilled))
    assert learner_state(ours) == learner_state(theirs)
    assert trainer_state(ours) == trainer_state(theirs)
    repeated = sum(len(lines) - 1 for lines in batches(folder).values())
    gap = max(
        abs(row["train/loss"] - expected["train/loss"]) for row, expected in zip(rows, expected_metrics, strict=True)
    )
    print(
        f"SIGKILL at file operation {moment} of {moments}, after step {trained}; resumed from {checkpoints[-1].name}, "
        f"{repeated} optimizer steps repeated; largest difference of losses {gap}"
    )
