"""The main job at a small scale, through the command line: real engine, real search server, Ray-hosted learner."""

import json
import re
import shutil
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_words import command_words
from shared_runs import SMALL, Running, agentrl, assert_phases_add_up, gone, here, metrics

from agentrl.config.load import load_config
from agentrl.core.types import StopReason
from agentrl.learner.checkpoints import read_state
from agentrl.learner.in_process import LocalLearnerGroup
from agentrl.learner.random_states import random_states, states_to_json
from agentrl.obs.trace import EPISODES, RUN, read_trace, trace_files

pytestmark = pytest.mark.slow

TRAIN = [
    "train",
    "--env",
    "search_r1",
    *SMALL,
    "run.dir=run",
    "rollout.batch_size=8",
    "train.steps=7",
    "train.save_every=2",
    "obs.trace=true",
]


@dataclass(frozen=True)
class Killed:
    """What was there after SIGKILL, before anything went on."""

    cwd: Path
    output: str
    started: list[str]
    """Command lines of its processes."""
    left: list[psutil.Process]
    checkpoint: Path
    """A copy of its last one."""
    diagnosis: str
    """What ``agentrl doctor`` printed about it."""

    @property
    def state(self) -> dict[str, Any]:
        return json.loads((self.checkpoint / "state.json").read_text())


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    cwd = tmp_path_factory.mktemp("trained")
    run = Running(*TRAIN, cwd=cwd, forks=False)
    try:
        run.wait_for(lambda: len([row for row in metrics(cwd / "run") if "train/reward" in row]) >= 3)
        children = run.descendants()
        started = [" ".join(command_words(child)) for child in children]
        run.send(signal.SIGKILL)
        run.finish()
        leftovers, output = gone(children), run.output()
    finally:
        run.end()
    last = max((cwd / "run" / "checkpoints").glob("step_*/state.json")).parent
    diagnosis = here("doctor", "run", cwd=cwd)
    assert diagnosis.returncode == 1
    return Killed(cwd, output, started, leftovers, shutil.copytree(last, cwd / last.name), diagnosis.stdout)


@pytest.fixture(scope="module")
def trained(killed: Killed) -> tuple[Path, str]:
    """The killed run, which has gone on to its end."""
    done = agentrl(*TRAIN, "--resume", cwd=killed.cwd, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    return killed.cwd / "run", done.stdout


def test_a_killed_run_ends_its_processes_and_leaves_a_whole_checkpoint(killed: Killed) -> None:
    for name in ("ray::LearnerActor", "raylet", "gcs_server", "agentrl.inference.embedded", "tools serve search"):
        assert any(name in line for line in killed.started), name
    assert not any(name in line for line in killed.started for name in ("dashboard.py", "monitor.py"))
    assert killed.left == [], "engine, tool server and learner end with a killed run"
    assert killed.state["step"] in (2, 4)
    assert killed.state["position"] == killed.state["step"] * 8
    assert_states_come_back(killed.checkpoint, killed.cwd)


def test_it_goes_on_from_its_last_checkpoint(killed: Killed, trained: tuple[Path, str]) -> None:
    folder, output = trained
    assert f"resuming from step_{killed.state['step']:06d}" in output
    steps = [row["step"] for row in metrics(folder) if "train/reward" in row]
    assert steps == list(range(1, 8)), "every step once, in order"


def test_reward_rises(trained: tuple[Path, str]) -> None:
    rows = metrics(trained[0])
    rewards = [row["train/reward"] for row in rows if "train/reward" in row]
    assert len(rewards) == 7
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards


def test_everything_lies_where_the_run_says(killed: Killed, trained: tuple[Path, str]) -> None:
    folder, output = trained
    assert "<search>" in killed.output, "the first step shows a rollout"
    for name in ("config.yaml", "metrics.jsonl", "rollouts", "curve.png", "checkpoints/step_000007/model/config.json"):
        assert (folder / name).exists(), name
    for word in ("checkpoint", "metrics", "rollouts", "curve.png", "exact match", "left"):
        assert word in output, word
    row = metrics(folder)[1]
    for key in ("train/reward", "rollout/searches", "rollout/valid_format", "train/flat_groups", "time/rollout_s"):
        assert key in row, key


def test_a_step_is_one_line_and_the_last_line_is_the_metrics_as_json(trained: tuple[Path, str]) -> None:
    lines = trained[1].splitlines()
    steps = [line for line in lines if re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d step \d+/", line)]
    assert steps
    assert all("exact match" in line and "left" in line for line in steps), steps
    assert "eval/exact_match" in json.loads(lines[-1])


def test_every_sampled_token_of_the_first_step_has_its_source(trained: tuple[Path, str]) -> None:
    lines = (trained[0] / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    assert lines
    for line in lines:
        for row in json.loads(line)["rows"]:
            for mask, provenance, version in zip(row["mask"], row["provenance"], row["versions"], strict=True):
                assert (mask == 1) <= (provenance == 1)
                assert version == (0 if provenance == 1 else -1)


def test_the_page_of_metrics_has_what_a_run_writes(trained: tuple[Path, str]) -> None:
    """And nothing else, but for what needs another configuration."""
    of_env = ("exact_match", "searches", "valid_format", "invalid_actions", "answer_length")
    groups = [f"hops={hops}" for hops in (1, 2, 3)]
    names = {
        "METRIC": of_env,
        "NAME": ("reward", "pass@1", *of_env),
        "REASON": [reason.value for reason in StopReason],
        "KEY=VALUE": groups,
        "K": ("1",),
        "TOOL": ("search",),
        "TURN": ("1", "2", "4", "8"),
        "KIND": ("learner", "engine", "tool_server", "ray", "other"),
    }
    lines = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text().splitlines()
    described = [line.split("`")[1] for line in lines if line.startswith("| `")]
    assert len(described) == len(set(described)) > 50
    rows = [row for row in metrics(trained[0]) if not row.get("rollout/from_journal")]  # whether there is one varies
    written = {key for row in rows for key in row} - {"step"}
    covered = set()
    for name in described:
        covered |= {key for key in written if key in _filled(name, names)}
    assert written - covered == set(), "written, but not on the page"
    elsewhere = {
        *(
            "rollout/from_journal",
            "rollout/forks/REASON",
            "train/skipped",
            "train/peak_gpu_gib",
            "train/kl",
            "train/kl_loss",
            "train/correction_mean",
            "train/correction_rejected",
            "train/processed_reward",
            "batch/convert/dropped",
            "batch/convert/masked_share",
        ),
        *(
            "train/teacher_kl",
            "train/teacher_kl/NAME",
            "time/teachers_s",
            "time/early_s",
            "time/score_s",
            "time/sleep_s",
            "time/judging_s",
            "time/judge_switch_s",
            "time/wake_s",
            "time/snapshot_s",
        ),
        *("time/start_warm_start_s", "time/start_critic_s", "rollout/accept_length", "train/compile_s"),
        *("train/value_loss", "train/value_mean", "train/value_explained_variance", "train/value_clip_fraction"),
        "train/value_grad_norm",
        *("data/measured", "data/success_rate", "data/unsolved", "data/near_target", "data/solved"),
        "data/left_out",
        *("rollout/max_running", "rollout/cache_stale", "rollout/cache_age_mean"),
        *("batch/replayed_share", "batch/routing_mib", "batch/support_size", "batch/support_mib", "batch/image_share"),
        *(
            name
            for name in described
            if name.startswith(("self_play/", "async/", "eval/endpoint/", "rollout/judge/", "reward/", "engines/"))
        ),
        *("train/METRIC/policy=NAME", "train/reward/role=ROLE", "rollout/turns/role=ROLE"),
        "time/pause_s",
        *("eval/lag_mean", "eval/lag_steps"),
        *("rollout/filtered_groups", "rollout/filtered/FILTER", "rollout/filtered_tokens", "rollout/unfiltered_reward"),
        *("data/epoch", "eval/rating", "eval/score", "eval/NAME/seat=SEAT", "eval/exploitability", "eval/other_output"),
    }
    missing = {name for name in described if not set(_filled(name, names)) & written}
    assert missing == elsewhere, "on the page, but not written"


def test_the_traces_have_each_turn_of_each_episode(killed: Killed, trained: tuple[Path, str]) -> None:
    files = {path.name: read_trace(path) for path in trace_files(trained[0])}
    assert [*files] == [f"step_{step:06d}.json" for step in range(1, 9)]
    for row in metrics(trained[0]):
        sampled = "rollout/turns" in row and not row.get("rollout/from_journal")
        if sampled and row["step"] > read_state(killed.checkpoint)["step"]:
            events = files[f"step_{row['step']:06d}.json"]
            [phase] = [event for event in events if event["name"] == "rollout" and event["pid"] == RUN]
            inside = [event for event in events if phase["ts"] <= event.get("ts", 0) <= phase["ts"] + phase["dur"]]
            count = Counter(event["name"] for event in inside if event["pid"] == EPISODES)
            assert count["rollout"] == row["rollout/episodes"]
            assert count["turn"] == pytest.approx(row["rollout/turns"] * row["rollout/episodes"])
            assert count["request"] == count["turn"]
            assert count["tool search"] == pytest.approx(row["rollout/searches"] * row["rollout/episodes"])
            assert {"train", "weights", f"step {row['step']}"} <= {event["name"] for event in events}


def test_the_doctor_of_the_killed_run(killed: Killed) -> None:
    assert killed.diagnosis.startswith("problem: the process of the run is gone\n    ")
    assert killed.diagnosis.count("problem: ") == 1
    assert killed.diagnosis.count("agentrl train --resume run.dir=run") == 1
    assert re.search(r"\b[3-7] of 7 steps are finished\n", killed.diagnosis)


def test_the_doctor_of_the_finished_run(killed: Killed, trained: tuple[Path, str]) -> None:
    done = here("doctor", "run", cwd=killed.cwd)
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("state: the run has finished\n    7 of 7 steps are finished\n")


def test_idle_time_is_that_of_the_phases(trained: tuple[Path, str]) -> None:
    rows = [row for row in metrics(trained[0]) if "train/reward" in row]
    for row in rows:
        causes = sum(value for key, value in row.items() if key.startswith("engine_idle/")) - row["engine_idle/total"]
        assert causes == pytest.approx(row["engine_idle/total"])
        assert 0 < row["engine_idle/learner"] <= 1.001 - row["learner_idle/total"]
        assert row["host_memory/total_gib"] > row["host_memory/trainer_gib"] > 0.05


def test_the_phases_of_a_step_add_up_to_it(trained: tuple[Path, str]) -> None:
    assert_phases_add_up(trained[0])


def _filled(name: str, names: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a name of the page with all that its placeholders stand for."""
    filled = [name]
    for placeholder, values in names.items():
        pattern = rf"\b{placeholder}(?=\b|_)"
        filled = [
            re.sub(pattern, value, one) for one in filled for value in (values if re.search(pattern, one) else [""])
        ]
    return filled


def test_the_audit_of_the_run_finds_nothing(trained: tuple[Path, str]) -> None:
    done = here("audit", "run", cwd=trained[0].parent)
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
        random = {file.name: file.read_bytes() for file in (checkpoint / "random").glob("[!.]*")}
        learner.save(folder / "fresh")
        learner.finish_save()
        assert not (folder / "fresh" / "optimizer").exists(), "it has taken no step"
        learner.load(checkpoint)
        learner.save(folder / "again")
        learner.finish_save()
    finally:
        learner.close()
    states = [
        f"{state_name}/{file.name}"
        for state_name in ("optimizer", "random")
        for file in (checkpoint / state_name).glob("[!.]*")
    ]
    assert len(states) == 2
    for name in [*states, "model/model.safetensors", "learner.json"]:
        assert (folder / "again" / name).read_bytes() == (checkpoint / name).read_bytes(), name
    for name, state in random.items():
        assert (folder / "fresh" / "random" / name).read_bytes() != state, f"{name}: nothing is shown"
    restored = read_state(checkpoint)["random"]
    assert json.loads(json.dumps(states_to_json(random_states()))) == restored
