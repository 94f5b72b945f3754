"""The main job at a small scale, through the command line: real engine, real search server, Ray-hosted learner."""

import json
import signal
from pathlib import Path

import pytest
from runs import SMALL, Running, agentrl, gone, metrics

from agentrl.config.load import load_config
from agentrl.learner.checkpoints import random_states, read_state
from agentrl.learner.local import LocalLearnerGroup

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    cwd = tmp_path_factory.mktemp("trained")
    done = agentrl(
        "train", "--env", "search_r1", *SMALL, "run.dir=run", "train.steps=12", "train.save_every=6", cwd=cwd
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return cwd / "run", done.stdout


def test_reward_rises(trained: tuple[Path, str]) -> None:
    rows = metrics(trained[0])
    rewards = [row["train/reward"] for row in rows if "train/reward" in row]
    assert len(rewards) == 12
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards


def test_everything_lies_where_the_run_says(trained: tuple[Path, str]) -> None:
    folder, output = trained
    for name in ("config.yaml", "metrics.jsonl", "rollouts", "curve.png", "checkpoints/step_000012/model/config.json"):
        assert (folder / name).exists(), name
    for word in ("checkpoint", "metrics", "rollouts", "curve.png", "<search>", "exact match", "left"):
        assert word in output, word
    row = metrics(folder)[1]
    for key in ("train/reward", "rollout/searches", "rollout/valid_format", "train/flat_groups", "time/rollout_s"):
        assert key in row, key


def test_every_sampled_token_of_the_first_step_has_its_source(trained: tuple[Path, str]) -> None:
    lines = (trained[0] / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    assert lines
    for line in lines:
        for row in json.loads(line)["rows"]:
            for mask, provenance, version in zip(row["mask"], row["provenance"], row["versions"], strict=True):
                assert (mask == 1) <= (provenance == 1)
                assert version == (0 if provenance == 1 else -1)


def test_the_audit_of_the_run_finds_nothing(trained: tuple[Path, str]) -> None:
    done = agentrl("audit", "run", cwd=trained[0].parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sampled turns" in done.stdout, "the run's configuration names the tokenizer"


def test_evaluation_of_the_checkpoint(trained: tuple[Path, str]) -> None:
    folder, _ = trained
    done = agentrl("eval", "--checkpoint", "run", "eval.size=48", "--json", "eval.json", cwd=folder.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((folder.parent / "eval.json").read_text())
    last = [row["eval/exact_match"] for row in metrics(folder) if "eval/exact_match" in row][-1]
    assert figures["eval/episodes"] == 48
    assert abs(figures["eval/exact_match"] - last) < 0.25
    assert {f"eval/exact_match/hops={hops}" for hops in (1, 2, 3)} <= set(figures)


def assert_states_come_back(checkpoint: Path, folder: Path) -> None:
    """What a learner loads from the checkpoint of a killed run, it saves again bit for bit; the driver likewise."""
    config = load_config(folder / "run" / "config.yaml")
    learner = LocalLearnerGroup(checkpoint / "model", config.learner, config.algo, seed=99)
    try:
        learner.save(folder / "fresh")
        learner.load(checkpoint)
        learner.save(folder / "again")
    finally:
        learner.close()
    states = [f"{part}/{file.name}" for part in ("optimizer", "random") for file in (checkpoint / part).glob("[!.]*")]
    assert len(states) == 2
    for name in [*states, "model/model.safetensors", "learner.json"]:
        assert (folder / "again" / name).read_bytes() == (checkpoint / name).read_bytes(), name
    for name in states:
        assert (folder / "fresh" / name).read_bytes() != (checkpoint / name).read_bytes(), f"{name}: nothing is shown"
    restored = read_state(checkpoint)["random"]
    assert json.loads(json.dumps(random_states())) == restored


def test_kill_then_resume_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    words = ["train", "--env", "search_r1", *SMALL, "run.dir=run", "train.steps=6", "train.save_every=2"]
    words += ["train.eval_first=false", "train.eval_every=0"]
    run = Running(*words, cwd=tmp_path)
    try:
        run.wait_for(lambda: len([row for row in metrics(tmp_path / "run") if "train/reward" in row]) >= 3)
        children = run.descendants()
        run.send(signal.SIGKILL)
        run.finish()
        assert gone(children) == [], "engine, tool server and learner end with a killed run"
    finally:
        run.end()
    states = sorted((tmp_path / "run" / "checkpoints").glob("step_*/state.json"))
    state = json.loads(states[-1].read_text())
    assert state["step"] in (2, 4)
    assert state["position"] == state["step"] * 16
    assert_states_come_back(states[-1].parent, tmp_path)
    done = agentrl(*words, "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"step_{state['step']:06d}" in done.stdout
    steps = [row["step"] for row in metrics(tmp_path / "run") if "train/reward" in row]
    assert steps == [1, 2, 3, 4, 5, 6], "every step once, in order"


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    run = Running(
        "train", "--env", "search_r1", *SMALL, "run.dir=run", "train.steps=50", "train.save_every=0", cwd=tmp_path
    )
    try:
        run.wait_for(lambda: len([row for row in metrics(tmp_path / "run") if "train/reward" in row]) >= 1)
        children = run.descendants()
        run.send(signal.SIGINT)
        assert run.finish() == 1
        assert "--resume" in run.output()
        assert gone(children) == []
    finally:
        run.end()
    state = json.loads(next((tmp_path / "run" / "checkpoints").glob("step_*/state.json")).read_text())
    assert state["step"] == max(row["step"] for row in metrics(tmp_path / "run"))


def test_a_tool_server_that_dies_stops_the_run_with_nothing_lost(tmp_path: Path) -> None:
    run = Running(
        "train", "--env", "search_r1", *SMALL, "run.dir=run", "train.steps=50", "train.save_every=0", cwd=tmp_path
    )
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
