"""What is found in run folders that the tests write."""

import json
import os
import re
import socket
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

import agentrl
from agentrl import Env, register_env, tool
from agentrl.cli.main import main
from agentrl.config.layers import save_config
from agentrl.config.load import validate
from agentrl.core.errors import CheckpointError, ConfigError, RunStopped
from agentrl.core.types import FinishReason, Turn
from agentrl.doctor.diagnose import diagnose
from agentrl.obs.journal import JournalLog
from agentrl.obs.rollouts import RolloutFile
from agentrl.obs.run_end import END, read_end, recorded_end
from agentrl.runtime.run_dir import locked
from tests.unit.audit.good_rollout import good

GOOD = {
    "train/reward": 0.5,
    "train/flat_groups": 0.2,
    "train/entropy": 1.0,
    "train/sampler_kl": 1e-4,
    "train/sampler_gap_max": 0.1,
    "train/ratio_max": 1.5,
    "train/clip_fraction": 0.01,
    "train/grad_norm": 0.3,
    "train/lr": 1e-5,
    "train/nonfinite_gradients": 0.0,
    "rollout/episodes": 64.0,
    "rollout/dropped": 0.0,
    "rollout/stop/terminated": 0.9,
    "rollout/stop/max_tokens": 0.1,
    "rollout/engine_restarts": 0.0,
    "engine_idle/total": 0.2,
    "engine_idle/learner": 0.2,
    "slot_idle/long_tail": 0.1,
    "host_memory/engine_gib": 4.0,
    "host_memory/trainer_gib": 1.0,
    "host_memory/total_gib": 5.0,
    "host_memory/used_share": 0.5,
    "time/step_s": 10.0,
}


class Run:
    """A run folder."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        save_config(validate({"train": {"steps": 60}, "sampler": {"backend": "sglang"}}), folder)

    def steps(self, count, **changed):
        """Write metrics; a value of ``changed`` may be a function of the step. Underscores stand for slashes once."""
        with (self.folder / "metrics.jsonl").open("w") as file:
            for step in range(1, count + 1):
                row = GOOD | {"step": step, "train/version": step, "train/reward": 0.3 + step / 100}
                for key, value in changed.items():
                    row[key.replace("__", "/")] = value(step) if callable(value) else value
                file.write(json.dumps(row) + "\n")
        return self

    def age(self, seconds):
        """Make all files older."""
        for path in self.folder.rglob("*"):
            os.utime(path, (time.time() - seconds,) * 2)
        return self

    def log(self, name, text):
        (self.folder / "logs").mkdir(exist_ok=True)
        (self.folder / "logs" / name).write_text(text)
        return self

    def holder(self, pid=2**22 + 1, host=None, since="2026-01-01 10:00:00"):
        (self.folder / "lock").write_text(f"process {pid} on {host or socket.gethostname()} since {since}\n")
        return self

    def checkpoint(self, step):
        checkpoint = self.folder / "checkpoints" / f"step_{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text("{}")
        return self

    def found(self):
        """Findings by title."""
        return {finding.title: finding for finding in diagnose(self.folder)}


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "first")


def problems(findings):
    return [title for title, finding in findings.items() if finding.severity != "state"]


def test_a_good_run(run):
    with locked(run.folder):
        actual = run.steps(30).found()
    assert [*actual] == ["the run is going on"]
    assert "30 of 60 steps are finished" in actual["the run is going on"].evidence


def test_no_run(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.yaml"):
        diagnose(tmp_path)


# The process


def test_a_killed_run(run):
    run.steps(12).holder(4242).checkpoint(10)
    [finding] = run.found().values()
    assert finding.title == "the process of the run is gone"
    assert f"process 4242 on {socket.gethostname()} since 2026-01-01 10:00:00" in finding.evidence
    assert "12 of 60 steps are finished" in finding.evidence
    assert f"resume it from step_000010: agentrl train --resume run.dir={run.folder}" in finding.advice


def test_a_run_on_another_machine(run):
    [finding] = run.steps(3).holder(host="node7").found().values()
    assert (finding.severity, "node7" in finding.title) == ("state", True)


def test_a_folder_that_no_process_used(run):
    assert [*run.found()] == ["no process has run here yet"]


@pytest.mark.parametrize(
    ("error", "title", "line"),
    [
        (None, "the run has finished", "0 of 60"),
        (RunStopped("a signal. The run is in x"), "the run was stopped", "RunStopped: a signal. The run is in x"),
        (ValueError("bad\nmore"), "the run has failed", "ValueError: bad"),
    ],
)
def test_how_a_run_ended_is_recorded(run, error, title, line):
    try:
        with recorded_end(run.folder):
            assert read_end(run.folder) is None
            if error is not None:
                raise error
    except (RunStopped, ValueError):
        pass
    [finding] = run.found().values()
    assert finding.title == title
    assert any(line in evidence for evidence in finding.evidence)
    with recorded_end(run.folder):
        assert read_end(run.folder) is None, "the record is that of the newest process"


def test_a_resume_that_is_refused_while_it_loads_leaves_the_record_of_the_earlier_end(run) -> None:
    with pytest.raises(RunStopped), recorded_end(run.folder):
        raise RunStopped("a signal")
    record = (run.folder / END).read_bytes()
    with pytest.raises(CheckpointError), recorded_end(run.folder, resumed=True):
        raise CheckpointError("written with another optimizer")
    assert (run.folder / END).read_bytes() == record
    with recorded_end(run.folder, resumed=True) as begin:
        begin()
        assert read_end(run.folder) is None
    assert read_end(run.folder).error == ""


STALL = """{time} nothing has ended for 2m00s
  step 13, rollout, waiting for
    rollout 13/0/6, turn 2: tool python, call 4.0, server python, since 20:41:07 (2m03s)

Thread 0x00007f (most recent call first):
  File "/x/threading.py", line 5 in wait
"""


def test_a_run_that_hangs(run):
    with locked(run.folder):
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() + 1))
        run.steps(12).log("watchdog.log", STALL.format(time=stamp)).age(500)
        [finding] = run.found().values()
    assert finding.title == "the run hangs"
    assert any("tool python, call 4.0" in line for line in finding.evidence)
    assert not any("threading.py" in line for line in finding.evidence)
    assert finding.advice[0].startswith(f"kill -USR1 {os.getpid()} ")
    assert any("rollout.max_seconds" in line for line in finding.advice)


def test_long_steps_are_no_hang(run):
    with locked(run.folder):
        assert [*run.steps(12, time__step_s=200.0).age(500).found()] == ["the run is going on"]


def test_reports_of_an_earlier_process_do_not_count(run):
    run.steps(3).log("watchdog.log", STALL.format(time="2026-01-01 09:00:00")).holder()
    [finding] = run.found().values()
    assert not any("tool python" in line for line in finding.evidence)


def test_a_dead_run_with_a_trace(run):
    events = [
        {"name": "rollout", "ph": "B", "pid": 2, "tid": 1, "args": {"of": "13/0/1"}},
        {"name": "tool x", "ph": "B", "pid": 2, "tid": 1, "args": {"of": "x, call 1"}},
        {"name": "turn", "ph": "B", "pid": 2, "tid": 2, "args": {"of": "1"}},
        {"name": "", "ph": "E", "pid": 2, "tid": 2},
    ]
    (run.folder / "traces").mkdir()
    (run.folder / "traces" / "step_000013.json").write_text(
        "[\n" + "".join(json.dumps(event) + ",\n" for event in events)
    )
    [finding] = run.steps(12).holder().found().values()
    assert finding.evidence[-2:] == ("  rollout 13/0/1", "  tool x x, call 1")


def test_engines_and_logs(run):
    run.steps(12, rollout__engine_restarts=lambda step: step // 6).holder()
    run.log(
        "engine-0.log",
        "ready\nTraceback (most recent call last):\n  File x\ntorch.OutOfMemoryError: CUDA out of memory\n",
    )
    run.log("search.log", "ready\n")
    actual = run.found()
    assert "the first was in step 6" in actual["engines died or hung and were restarted"].evidence[0]
    assert "torch.OutOfMemoryError: CUDA out of memory" in actual["logs/engine-0.log has an error"].evidence[-1]
    assert "logs/search.log has an error" not in actual


def test_disk_memory_and_failures(run, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=2**29))
    run.steps(
        20, host_memory__used_share=0.97, host_memory__engine_gib=lambda step: 4 + step / 5, rollout__dropped=32.0
    ).holder()
    actual = run.found()
    assert actual["the disk of the run folder is full"].evidence[0].startswith("0.50 GiB are free")
    assert "0.97" in actual["the machine or its container has little memory left"].evidence[0]
    assert (
        "host_memory/engine_gib: 5.00 → 8.00" in actual["the memory of the processes of kind engine grows"].evidence[0]
    )
    assert "50%" in actual["many episodes fail"].evidence[0]


# Learning

LEARNING = {
    "almost no group has reward variance, so there is nothing to learn from": {"train__flat_groups": 0.97},
    "filters drop most groups, so most sampling is lost": {
        "rollout__filtered_groups": 99.0,
        "rollout__filtered__all_solved": 99.0,
    },
    "limits cut most episodes": {"rollout__stop__max_tokens": 0.9},
    "the reward has not changed": {"train__reward": lambda step: 0.3 + 0.01 * (step % 3)},
    "the reward has fallen": {"train__reward": lambda step: 0.9 - step / 100},
    "the reward has collapsed": {"train__reward": lambda step: min(step / 30, 0.7) if step < 26 else 0.0},
    "the KL divergence to the reference explodes": {"train__kl": lambda step: 0.004 if step < 27 else 3.0 * step},
    "metrics are not finite": {"train__loss": lambda step: 0.1 if step < 24 else None},
    "the gradient norm explodes": {"train__grad_norm": lambda step: 0.3 if step < 28 else 8e5},
    "the entropy has collapsed: samples of a task are alike": {"train__entropy": lambda step: 2.0 / step**2},
    "the entropy explodes: samples become random": {"train__entropy": lambda step: 0.5 * 1.1**step},
    "limits cut more and more episodes": {"rollout__stop__max_tokens": lambda step: 0.05 if step < 15 else 0.4},
    "episodes have become very long": {"rollout__sampled_tokens": lambda step: 640 if step < 20 else 6400},
    "episodes have become very short": {"rollout__sampled_tokens": lambda step: 6400 if step < 20 else 64},
    "much of what is sampled is not trained": {"async__masked_share": 0.8},
    "the critic does not predict the returns": {"train__value_explained_variance": -0.4},
    "engine and learner disagree on the policy": {"train__sampler_kl": lambda step: 1e-4 * step**2},
    "the policy moves far from what sampled its tokens": {"train__clip_fraction": 0.5},
    "gradients are not finite, so optimizer steps are skipped": {"train__nonfinite_gradients": 1.0},
    "optimizer steps change no weight, so a weight sync changes nothing": {"train__grad_norm": 0.0},
    "engines are idle most of the time": {"engine_idle__total": 0.8, "engine_idle__learner": 0.7},
    "the long tail of the rollouts leaves slots unused": {"slot_idle__long_tail": 0.6},
}  # fmt: skip


@tool(timeout_s=1)
async def look_up(word: str) -> str:
    """Look a word up."""
    return word


@register_env("doctor_with_tools")
class WithTools(Env):
    """Its tools are described by the chat template, if it has a place for them."""

    tools = (look_up,)


@pytest.mark.parametrize("prompt", ["What?", "You may call look_up. What?"])
def test_tools_that_no_prompt_has(run, prompt):
    save_config(validate({"env": {"name": "doctor_with_tools"}}), run.folder)
    file = RolloutFile(run.folder / "rollouts" / "step_000001.jsonl")
    file.write([replace(good("0/0/0"), prompt=prompt)])
    file.finish()
    with locked(run.folder):
        found = run.steps(30).found()
    assert problems(found) == ([] if "look_up" in prompt else ["the policy never reads its tools"])


@pytest.mark.parametrize("title", LEARNING)
def test_what_keeps_a_run_from_learning(run, title):
    with locked(run.folder):
        actual = run.steps(30, **LEARNING[title]).found()
    assert problems(actual) == [title]
    finding = actual[title]
    assert re.search(r"\d", " ".join(finding.evidence)), "evidence has figures"
    assert finding.advice


def evaluations(run, **values):
    """Append evaluations with the values of metrics, one after the other, to the metrics of a run."""
    with (run.folder / "metrics.jsonl").open("a") as file:
        for number in range(len(next(iter(values.values())))):
            row = {name.replace("__", "/"): series[number] for name, series in values.items()}
            file.write(json.dumps({"step": 10 * number, "time/eval_s": 3.0} | row) + "\n")


@pytest.mark.parametrize(
    ("values", "falls"),
    [
        ({"eval__reward": [0.5, 0.8, 0.1]}, True),
        ({"eval__reward": [0.5, 0.8, 0.1], "eval__reward/ci95": [0.05] * 3}, True),
        ({"eval__hard__reward": [0.1, 0.4, 0.3], "eval__hard__reward/ci95": [0.01] * 3}, True),
        ({"eval__exact_match": [0.9, 0.9, 0.2]}, True),
        ({"eval__reward": [0.5, 0.8, 0.7]}, False),
        ({"eval__reward": [0.5, 0.8, 0.5], "eval__reward/ci95": [0.2] * 3}, False),
        ({"eval__turns": [5.0, 5.0, 1.0], "eval__reward/hops=2": [0.9, 0.9, 0.1]}, False),
        ({"eval__reward": [0.5, 0.8, None]}, False),
        ({"eval__reward": [None, None]}, False),
        ({"eval__reward": [0.9]}, False),
    ],
)
def test_an_evaluation_that_falls(run, values, falls):
    save_config(validate({"train": {"steps": 60, "stop_at": {"exact_match": 0.98}}}), run.folder)
    run.steps(30)
    evaluations(run, **values)
    with locked(run.folder):
        found = run.found()
    is_null = None in next(iter(values.values()))
    assert problems(found) == ["evaluations were far better before"] * falls + ["metrics are not finite"] * is_null


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.3])
def test_noise_is_no_collapse(run, noise):
    random = Random(5)
    for steps in (8, 30):
        for _ in range(5):
            rewards = [0.4 + noise * random.uniform(-1, 1) for _ in range(steps)]
            run.steps(steps, train__reward=lambda step, rewards=rewards: rewards[step - 1])
            assert "the reward has collapsed" not in run.found()


def test_engines_of_a_short_or_small_run_may_be_idle(run):
    idle = {"engine_idle__total": 0.9, "engine_idle__learner": 0.9}
    with locked(run.folder):
        assert not problems(run.steps(8, **idle).found())
        assert not problems(run.steps(30, **idle, time__step_s=1.0).found())
        assert problems(run.steps(30, **idle).found())
        save_config(validate({"train": {"steps": 60}}), run.folder)
        assert not problems(run.found()), "the embedded engine is on the CPU"


def test_a_few_steps_are_no_evidence(run):
    with locked(run.folder):
        assert not problems(run.steps(3, train__reward=0.3, train__entropy=lambda step: 1 / step**9).found())
        assert not problems(run.steps(0).found())


def test_a_solved_task_is_no_problem(run):
    with locked(run.folder):
        actual = run.steps(30, train__reward=1.0).found()
    assert actual["the reward has not changed"].severity == "hint"


def test_the_reward_of_a_run_with_filters_is_that_before_them(run):
    with locked(run.folder):
        actual = run.steps(30, train__reward=0.5, rollout__unfiltered_reward=lambda step: 0.1 + step / 50).found()
    assert not problems(actual)


def test_the_cause_of_a_disagreement(run):
    late = run.steps(30, train__sampler_kl=lambda step: 1e-4 * step**2).found()
    always = run.steps(30, train__sampler_kl=0.05).found()
    title = "engine and learner disagree on the policy"
    assert "old weights" in late[title].advice[0]
    assert "from the start" in always[title].advice[0]


def test_a_disagreement_is_held_against_the_limits_of_precision_and_turn(run):
    gaps = {"sync__gap_limit": 2e-3, "sync__gap": 3e-4, "sync__gap__turn=8": 3e-4, "sync__gap__turn=1": 1e-4}
    title = "engine and learner disagree on the policy"
    assert title not in run.steps(30, train__sampler_kl=3e-3, **gaps).found()
    evidence = run.steps(30, train__sampler_kl=5e-3, **gaps).found()[title].evidence
    assert "its limit is 0.004 (twice sync/gap_limit, which weights.gap_limit sets)" in evidence[0]
    expected = "sync/gap, after the first sync, was 0.0001 in turn 1 (limit 0.002), 0.0003 in turn 8 (limit 0.0037)"
    assert evidence[-1] == expected


# The command, and the keys that it names


def test_the_command(run, capsys):
    run.steps(30, train__flat_groups=1.0)
    with locked(run.folder):
        assert main(["doctor", str(run.folder)]) == 1
    output = capsys.readouterr()
    assert "problem: almost no group has reward variance" in output.out
    assert "→ rollout.n_samples_per_prompt" in output.out
    assert output.err.endswith(f"doctor: 1 problem in {run.folder}\n")
    with locked(run.folder):
        run.steps(30)
        assert main(["doctor", str(run.folder)]) == 0
    assert main(["doctor", str(run.folder / "none")]) == 2


def test_every_key_that_advice_names_exists():
    files = Path(agentrl.__file__).parent.glob("doctor/*_checks.py")
    sections = "rollout|sampler|learner|algo|train|batch|tasks|data|model|weights|obs|sandbox|placement"
    tree = validate({"model": {"path": "x"}}).model_dump()
    named = {
        key for file in files for key in re.findall(rf"(?<![\w./])((?:{sections})\.[a-z_.]*[a-z_])", file.read_text())
    }
    assert len(named) > 20
    for key in named:
        if key.startswith("sampler.sglang."):  # options of SGLang
            continue
        value = tree
        for word in key.split("."):
            assert isinstance(value, dict), key
            assert word in value, key
            value = value[word]


# The journal


def journal(run, *records, age=0.0):
    """Write records of a process that began so many seconds ago."""
    log = JournalLog(run.folder)
    for event, fields in [("begin", {"step": 0, "first": 0, "ahead": [], "keys": {}, "discards": False}), *records]:
        log.write(event, **fields, time=time.time() - age)
    log.close()


def test_a_group_that_was_trained_twice(run):
    for step in (1, 2):
        journal(run, ("taken", {"step": step, "positions": [0], "dropped": [], "first": step, "ahead": []}))
    journal(run, ("trained", {"step": 1}), ("trained", {"step": 2}))
    finding = run.steps(2).holder().found()["not every group was trained once"]
    assert finding.severity == "problem"
    assert any("group 0 was trained 2 times: in the steps 1, 2" in line for line in finding.evidence)


def test_a_group_that_does_not_end(run):
    journal(run, ("admitted", {"position": 3, "version": 1}), ("admitted", {"position": 4, "version": 1}), age=7200)
    journal(run, ("finished", {"position": 4, "rollouts": 2, "failed": 0, "order": [0, 1]}), age=7000)
    with locked(run.folder):
        finding = run.steps(3).found()["a group of episodes does not end"]
    assert "group 3, admitted 2.0h ago with policy version 1, has not ended" in finding.evidence
    assert "the last 1 groups took 3m (median), at most 3m" in finding.evidence


# Causes before symptoms


FLAT = {"train__flat_groups": lambda step: 1.0 if step > 12 else 0.2}
SIZES = {"rollout__turns": 1.0, "rollout__cut_turns": 0.0}


def test_a_reward_that_is_constant_since_a_step(run):
    """The policy writes as before: it is the reward function."""
    rewards = {"train__reward": lambda step: 0.0 if step > 12 else 0.4}
    findings = run.steps(30, rollout__sampled_tokens=1000.0, **FLAT, **SIZES, **rewards).found()
    finding = findings[problems(findings)[0]]
    assert finding.title == "every reward is 0 since step 13, so there is nothing to learn from"
    assert finding.evidence[1] == "before: 0.400 to 0.400"
    assert "reward.function" in finding.advice[0]


@pytest.mark.parametrize(
    "changed",
    [
        {"rollout__sampled_tokens": lambda step: 1000.0 if step <= 12 else 1200.0},
        {"rollout__sampled_tokens": 1000.0, "rollout__cut_turns": lambda step: 0.1 if step <= 12 else 0.9},
    ],
)
def test_a_policy_that_broke(run, changed):
    rewards = {"train__reward": lambda step: 0.0 if step > 12 else 0.4}
    findings = run.steps(30, **FLAT | SIZES | rewards | changed).found()
    finding = findings["the policy broke before step 13: every reward is 0 since"]
    assert problems(findings)[0] == finding.title
    assert "learner.optimizer.lr" in finding.advice[0]


def test_a_reward_that_was_never_another(run):
    findings = run.steps(30, train__reward=0.5, train__flat_groups=1.0).found()
    assert problems(findings) == ["every reward is 0.5, so there is nothing to learn from"]
    solved = run.steps(30, train__reward=1.0, train__flat_groups=1.0).found()
    assert not any("every reward" in title for title in solved)


def test_turns_that_are_cut(run):
    findings = run.steps(30, rollout__cut_turns=0.8, train__reward=0.0, train__flat_groups=1.0).found()
    assert problems(findings)[0] == "limits cut most turns"
    assert "sampler.max_new_tokens" in findings["limits cut most turns"].advice[0]
    findings = run.steps(30, rollout__cut_turns=0.6, train__reward=0.5, train__flat_groups=1.0).found()
    assert problems(findings) == ["every reward is 0.5, so there is nothing to learn from"], "not all turns are cut"
    rewards = {
        "train__reward": lambda step: 0.3 if step < 3 else 0.0,
        "rollout__sampled_tokens": 1000.0,
        "rollout__turns": 1.0,
    }
    cut = {"rollout__cut_turns": lambda step: 0.7 if step < 3 else 1.0}
    flat = {"train__flat_groups": lambda step: 0.2 if step < 3 else 1.0}
    findings = run.steps(30, **rewards, **cut, **flat).found()
    assert "limits cut most turns" not in findings, "a policy that broke"


def test_a_reward_that_pays_for_length(run):
    title = "longer answers get higher rewards, and answers grow"
    growing = {"rollout__sampled_tokens": lambda step: 1000.0 + 100 * step, "rollout__turns": 1.0}
    write_answers(run.folder, [10, 40, 20, 30])
    findings = run.steps(30, train__reward=lambda step: step / 30, **growing).found()
    assert problems(findings)[0] == title
    assert findings[title].evidence[0] == "correlation of reward and length within a group: 1.00 in the first 5 steps"
    assert title not in run.steps(30, train__reward=lambda step: step / 30, **SIZES).found(), "answers do not grow"
    write_answers(run.folder, [40, 10, 10, 40])
    assert title not in run.steps(30, train__reward=lambda step: step / 30, **growing).found(), "length does not pay"


def write_answers(folder, lengths):
    """Write the rollouts of two groups, whose rewards rise with 10, 40, 20 and 30 characters."""
    file = RolloutFile(folder / "rollouts" / "step_000001.jsonl")
    for group, base in (("a", 0.0), ("b", 5.0)):
        for number, (length, reward) in enumerate(zip(lengths, (0.1, 0.4, 0.2, 0.3), strict=True)):
            turns = [Turn("x" * length, "", FinishReason.STOP)]
            rollout = replace(
                good(), prompt_id=group, rollout_id=f"{group}/{number}", reward=base + reward, turns=turns
            )
            file.write(rollout)
    file.finish()


def test_few_tasks(run):
    save_config(
        validate({"data": {"path": "few.jsonl"}, "rollout": {"batch_size": 4}, "train": {"steps": 30}}), run.folder
    )
    run.steps(30, train__reward=lambda step: step / 30)
    write_tasks(run.folder, 30, 2)
    finding = run.found()["only 2 tasks, each trained 60 times"]
    assert finding.evidence[0] == "the last 1 steps have 2 tasks of data.path=few.jsonl"
    assert "data.path" in finding.advice[0]
    write_tasks(run.folder, 29, 5)
    assert problems(run.found()) == []


def write_tasks(folder, step, tasks):
    """Write a rollout of each task."""
    file = RolloutFile(folder / "rollouts" / f"step_{step:06d}.jsonl")
    for number in range(tasks):
        file.write(replace(good(), prompt_id=f"few.jsonl:{number}", rollout_id=f"few.jsonl:{number}/0"))
    file.finish()


def test_tools_that_fail_and_tools_that_are_slow(run):
    tools = {"tool/slow/calls": 50.0, "tool/slow/seconds": 3.0, "tool/slow/failed_share": 0.0}
    tools |= {"tool/quick/calls": 100.0, "tool/quick/seconds": 0.1, "tool/quick/failed_share": 0.1}
    findings = run.steps(30, slot_idle__tools=0.7, **tools).found()
    assert problems(findings) == ["episodes wait for a tool most of the time"]
    (finding,) = (finding for finding in findings.values() if finding.severity != "state")
    assert finding.evidence[1] == "tool/slow/seconds is 3.00; 94% of the time in tools"
    assert problems(run.steps(30, slot_idle__tools=0.2, **tools).found()) == []
    findings = run.steps(30, **tools | {"tool/quick/failed_share": lambda step: step / 60}).found()
    assert problems(findings) == ["calls of a tool fail"]
    assert findings["calls of a tool fail"].evidence == ("42% of 1000 calls of quick in the last 10 steps",)


def test_few_episodes_at_a_time(run):
    save_config(validate({"train": {"steps": 60}, "rollout": {"concurrency": 8}}), run.folder)
    assert problems(run.steps(30, time__rollout_s=8.0).found()) == [
        "sampling takes most of a step, with a low concurrency"
    ]
    assert problems(run.steps(30, time__rollout_s=5.0).found()) == []
    assert problems(run.steps(30, time__rollout_s=8.0, rollout__episodes=60.0).found()) == []


def test_metrics_that_a_run_has_not_written(run):
    """Such as those of a run of another version."""
    for left_out in GOOD:
        rows = [
            {key: value for key, value in GOOD.items() if key != left_out} | {"step": step} for step in range(1, 31)
        ]
        (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        run.found()


def test_a_cut_distribution(run):
    save_config(validate({"sampler": {"top_p": 0.5, "allow_unnormalised": True}}), run.folder)
    title = "engine and learner disagree on the policy, and no metric shows it"
    assert problems(run.steps(30).found()) == [title]


def test_a_renormalised_distribution_is_not_the_engines(run):
    run.steps(30, train__sampler_kl=0.5)
    assert problems(run.found())
    algo = {"old_logprobs": "learner", "correction": {"rollout_is": "none"}}
    save_config(validate({"sampler": {"top_k": 20, "renormalise": "learner"}, "algo": algo}), run.folder)
    assert not problems(run.found())


# Judges


def test_a_judge_that_fails_and_one_that_contradicts_itself(run):
    calm = {"rollout__judge/calls": 2.0, "rollout__judge/failed_calls": 0.1, "rollout__judge/agreement": 0.9}
    assert not [title for title in run.steps(30, **calm).found() if "judge" in title]
    failing = {"rollout__style/calls": 2.0, "rollout__style/failed_calls": 0.5, "rollout__style/agreement": 0.4,
               "reward__style/failed": 0.3, "reward__rm/failed": 0.3}  # fmt: skip
    findings = run.steps(30, **failing).found()
    titles = [title for title in findings if "judge" in title or "the reward " in title]
    assert titles == ["the judge style fails", "the reward rm fails", "the judge style contradicts itself"]
    assert findings["the judge style fails"].evidence[0] == "25% of the calls in the last 20 steps had no score"
