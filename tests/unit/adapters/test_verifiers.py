"""Environments of verifiers: tasks and splits, failures by name, and the process, which a script plays here."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from verifiers_episodes import play_tasks, policy_texts

from agentrl import ConfigError, Task
from agentrl.adapters.verifiers import VerifiersEnv
from agentrl.adapters.verifiers.process import VerifiersError, VerifiersProcess, verifiers_process
from agentrl.core.errors import UnknownNameError

INTERPRETER = """#!PYTHON
# In place of an interpreter with verifiers: reads the calls of worker.py.
import json, sys, threading, urllib.request

printing = threading.Lock()
print("ready", flush=True)


def turn(url):
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "Say 1."}]}).encode()
    request = urllib.request.Request(url + "/chat/completions", body, {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]


def reply(number, call, config, size, index=0, url="", model=""):
    taskset = config["taskset"]["id"]
    if call == "list_tasks":
        if taskset == "missing":
            return {"number": number, "error": "ModuleNotFoundError: taskset 'missing' not found"}
        return {"number": number, "value": [{"name": f"n{i}", "prompt": f"Say {i}."} for i in range(min(10, size))]}
    if taskset == "silent":
        return {"number": number, "value": {"reward": 1.0, "metrics": {}}}
    if taskset == "broken":
        turn(url)
        return {"number": number, "value": {"failure": "TaskError: reward 'exact': RuntimeError: it broke (task_error)"}}
    text = turn(url)
    if text == "wait":
        return None
    if text == "garbled":
        print("{", flush=True)
        return None
    return {"number": number, "value": {"reward": float(text == str(index)), "metrics": {"characters": len(text)}}}


def serve(request):
    if request["call"] != "cancel" and (line := reply(**request)) is not None:
        with printing:
            print(json.dumps(line), flush=True)


for line in sys.stdin:
    threading.Thread(target=serve, args=(json.loads(line),), daemon=True).start()
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("bin") / "python"
    path.write_text(INTERPRETER.replace("PYTHON", sys.executable))
    path.chmod(0o755)
    yield str(path)
    verifiers_process(str(path)).close()


def tasks_of(python: str, split: str = "train", **options: Any) -> list[Task]:
    return [*VerifiersEnv.configured_tasks(split, 0, {"id": "numbers", "python": python, **options})]


def test_splits_share_no_task(python: str) -> None:
    train, evaluation = tasks_of(python, eval_size=3), tasks_of(python, "eval", eval_size=3)
    assert [task.question for task in evaluation] == ["Say 0.", "Say 1.", "Say 2."]
    assert [task.question for task in train] == [f"Say {number}." for number in range(3, 10)]
    assert train[0].metadata["name"] == "n3"
    assert len(tasks_of(python, "eval")) == len(tasks_of(python)) == 5, "half of a small taskset is for evaluation"
    own = {"taskset": {"split": "test"}}
    assert len(tasks_of(python, eval_config=own)) == 10
    (task,) = tasks_of(python, "eval", eval_config=own, eval_size=1)
    assert task.metadata["verifiers"]["config"] == {"taskset": {"split": "test", "id": "numbers"}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "missing"}, r"env\.options\.id=missing: ModuleNotFoundError: taskset 'missing' not found"),
        ({"size": 0}, r"env\.options\.size=0 must be at least 1"),
        ({"config": {"taskset": 1}}, r"env\.options\.config\.taskset=1 must be a mapping"),
        ({"python": "/no/python"}, r"env\.options\.python=/no/python: .*No such file"),
        ({"taskset": "x"}, r"env\.options: .*'taskset'"),
        ({"python": "/bin/true"}, r"the process of verifiers ended \(status 0\)"),
    ],
)
def test_options_that_do_not_fit_are_refused(python: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tasks_of(**{"python": python, **options})


def test_splits_are_train_and_eval(python: str) -> None:
    with pytest.raises(UnknownNameError, match="split of verifiers"):
        tasks_of(python, "test")


def test_an_interpreter_without_verifiers_is_named() -> None:
    with pytest.raises(
        ConfigError, match=f"python={sys.executable}: No module named 'verifiers'.*has no verifiers from 0.4"
    ):
        tasks_of(sys.executable)


def test_64_episodes_at_the_same_time(python: str) -> None:
    tasks = (tasks_of(python, "eval") * 13)[:64]
    rollouts, sampler = asyncio.run(play_tasks(tasks, lambda prompt: "1"))
    assert [rollout.reward for rollout in rollouts] == [float(n % 5 == 1) for n in range(64)]
    assert all(rollout.failure is None and policy_texts(rollout) == ["1"] for rollout in rollouts)
    assert rollouts[0].metrics["characters"] == 1.0
    assert sampler.max_running > 1


@pytest.mark.parametrize(
    ("taskset", "message"),
    [
        ("broken", "verifiers: TaskError: reward 'exact': RuntimeError: it broke (task_error)."),
        ("silent", "verifiers: it ended without a turn of the policy."),
    ],
)
def test_a_failure_is_no_reward(python: str, taskset: str, message: str) -> None:
    (rollout,), _ = asyncio.run(play_tasks(tasks_of(python, id=taskset)[:1], lambda prompt: "1"))
    assert rollout.failure is not None
    assert (rollout.failure.kind, rollout.failure.message) == ("environment", message)
    assert rollout.dropped


def test_a_lost_process_is_named_and_another_one_plays_on(python: str) -> None:
    (task,) = tasks_of(python)[:1]

    def kill_worker(prompt: str) -> str:
        os.kill(verifiers_process(python).pid, signal.SIGKILL)
        return "wait"

    (lost,), _ = asyncio.run(play_tasks([task], kill_worker))
    assert lost.failure is not None
    assert f"env.options.python={python}: the process of verifiers ended (signal SIGKILL)" in lost.failure.message
    assert lost.dropped
    (rollout,), _ = asyncio.run(play_tasks([task], lambda prompt: "5"))
    assert (rollout.reward, rollout.failure) == (1.0, None)


def test_a_line_that_cannot_be_read_ends_the_process(python: str) -> None:
    (rollout,), _ = asyncio.run(play_tasks(tasks_of(python)[:1], lambda prompt: "garbled"))
    assert rollout.failure is not None
    assert "it printed a line that is no reply: '{'" in rollout.failure.message


def test_an_episode_that_takes_too_long_is_cancelled(python: str) -> None:
    (rollout,), _ = asyncio.run(play_tasks(tasks_of(python)[:1], lambda prompt: "wait", max_seconds=0.2))
    assert rollout.failure is not None
    assert "verifiers: did not end within rollout.max_seconds=0.2." in rollout.failure.message


def test_calls_of_a_closed_process_start_another(python: str) -> None:
    process = verifiers_process(python)
    process.close()
    config = {"taskset": {"id": "missing"}}
    with pytest.raises(VerifiersError, match="'missing' not found"):
        process.call("list_tasks", config=config, size=1)[1].result(60)


def test_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plays its episodes itself"):
        VerifiersEnv("numbers").step(None)  # type: ignore[arg-type]


def test_a_process_that_ends_fails_no_call_of_the_next(python: str) -> None:
    process, gate = VerifiersProcess(python), threading.Event()
    config = {"taskset": {"id": "missing"}}
    with pytest.raises(VerifiersError, match="'missing' not found"):
        process.call("list_tasks", config=config, size=1)[1].result(60)
    first = process._process
    assert first is not None
    wait = first.wait

    def wait_as_a_late_reader(timeout: float | None = None) -> int:
        code = wait(timeout)
        if threading.current_thread() is not threading.main_thread():
            gate.wait(60)
        return code

    first.wait = wait_as_a_late_reader  # type: ignore[method-assign]
    process.close()
    _, value = process.call("list_tasks", config=config, size=1)
    gate.set()
    with pytest.raises(VerifiersError, match="'missing' not found"):
        value.result(60)
    process.close()
