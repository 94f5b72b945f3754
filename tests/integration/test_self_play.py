"""Self-play from a configuration: a run that is killed and resumed has the checkpoint's league and goes on to its end."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from shared_runs import ONE_THREAD, Running, agentrl, gone, here, metrics

from agentrl.learner.checkpoints import complete_checkpoints, load_state

pytestmark = pytest.mark.slow

STEPS = 4
EPISODES = 8
WORDS = [
    "--config", "self_play/kuhn_poker", "model.warm_start=null", "rollout.batch_size=4", "rollout.n_samples_per_prompt=2",
    f"train.steps={STEPS}", "train.save_every=1", "train.keep=9", "train.eval_every=0", "train.eval_first=false",
    "self_play.mix={mirror: 2, past: 1, 'fixed:random': 1}",
    "self_play.pool.snapshot_every=1", "self_play.pool.keep=3", "eval.size=2", "obs.tensorboard=false",
    "sampler.embedded.slots=16", *ONE_THREAD,
]  # fmt: skip
TARGET = "self_play_run:main"


@dataclass(frozen=True)
class Resumed:
    """A run that was killed by SIGKILL and resumed."""

    folder: Path
    killed_with: dict[str, Any]
    """State of the newest checkpoint at the kill."""
    begun_with: dict[str, Any]
    """State of the resumed run before its first step."""


def newest_state(folder: Path) -> dict[str, Any]:
    """Return the state of the newest checkpoint."""
    return load_state(complete_checkpoints(folder / "checkpoints")[-1])


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    cwd = tmp_path_factory.mktemp("self_play")
    folder = cwd / "run"
    run = Running("train", *WORDS, "run.dir=run", cwd=cwd, target=TARGET)
    try:
        run.wait_for((folder / "checkpoints" / "step_000001").exists)
        children = run.descendants()
        run.send(signal.SIGKILL)
        assert run.finish() == -signal.SIGKILL
    finally:
        run.end()
    assert gone(children) == [], "engines"
    killed_with = newest_state(folder)
    assert killed_with["step"] < STEPS, "it has steps left to take"
    run = Running("train", "--resume", "run.dir=run", cwd=cwd, target=TARGET)
    try:
        assert run.finish() == 0, run.output()
    finally:
        run.end()
    return Resumed(folder, killed_with, json.loads((cwd / "begun.json").read_text()))


def test_a_resumed_run_begins_with_the_state_of_the_checkpoint(resumed: Resumed) -> None:
    """Pool, ratings, results and alarm of the league, baselines, random states, and the counters of the trainer."""
    assert resumed.begun_with == resumed.killed_with
    league = resumed.begun_with["source"]["self_play"]
    assert len(league["snapshots"]) >= 2, "one is taken before the first step"
    assert {"policy", "step_000000", "fixed:random"} <= set(league["ratings"])
    assert resumed.begun_with["estimators"]
    assert set(resumed.begun_with["random"]) == {"torch", "numpy", "python"}


def test_it_goes_on_to_its_end_and_counts_each_game_once(resumed: Resumed) -> None:
    state = newest_state(resumed.folder)
    assert state["step"] == STEPS
    assert [row["step"] for row in metrics(resumed.folder)] == [1, 2, 3, 4, 4], "the last is an evaluation"
    games = sum(sum(counts) for _, _, _, *counts in state["source"]["self_play"]["results"])
    assert games == 2 * STEPS * EPISODES, "each counts for both seats"


def test_what_it_writes(resumed: Resumed) -> None:
    rows = [json.loads(line) for line in (resumed.folder / "league.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "ratings" in row] == [1, 2, 3, 4]
    [evaluation] = [row for row in rows if "evaluation" in row]
    assert (evaluation["step"], set(evaluation["evaluation"])) == (STEPS, {"random", "nash"})
    *_, last = metrics(resumed.folder)
    for name in ("random/reward", "random/score", "nash/score", "exploitability", "pool_exploitability", "rating"):
        assert f"eval/{name}" in last, name
    assert {"train/reward/role=first", "rollout/illegal/role=second", "self_play/score/role=second"} <= set(
        metrics(resumed.folder)[0]
    )
    done = here("league", "run", cwd=resumed.folder.parent)
    assert done.returncode == 0, done.stderr
    assert f"after step {STEPS}" in done.stdout
    assert (resumed.folder / "league.png").is_file()


def test_an_evaluation_of_its_last_checkpoint_finds_the_same_exploitability(resumed: Resumed) -> None:
    done = agentrl("eval", "--checkpoint", "run", "--json", "eval.json", cwd=resumed.folder.parent)
    assert done.returncode == 0, done.stderr
    record = json.loads((resumed.folder.parent / "eval.json").read_text())
    *_, last = metrics(resumed.folder)
    for key in ("eval/exploitability", "eval/other_output"):
        assert record[key] == pytest.approx(last[key], abs=1e-5)
    assert "exploitability 0." in done.stdout
