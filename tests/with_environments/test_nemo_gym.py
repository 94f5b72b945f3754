"""NeMo Gym's own resource servers, each a process with its own packages, and episodes of the adapter at them."""

import json
import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from adapter_episodes import play

from agentrl import Task
from agentrl.adapters.nemo_gym import NemoGymEnv
from agentrl.adapters.nemo_gym.rows import row_task
from agentrl.core.types import FailureKind, StopReason
from agentrl.testing import check_env
from tests.with_environments.conftest import Serve, python_of

pytestmark = pytest.mark.environments
SERVER = "nemo_gym_server.py"
FIND = "from importlib.util import find_spec; print(find_spec('resources_servers').submodule_search_locations[0])"


def rows(tmp_path: Path, example: str, count: int) -> Any:
    """The tasks of an example of the package, again and again up to ``count``."""
    folder = subprocess.run([str(python_of("nemo-gym")), "-c", FIND], capture_output=True, text=True, check=True).stdout
    lines = Path(folder.strip(), example, "data", "example.jsonl").read_text().splitlines()
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join((lines * count)[:count]))
    return NemoGymEnv.configured_tasks("train", 0, {"url": "http://127.0.0.1:1", "rows": {"train": str(file)}})


def write_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def count_as_asked(conversation: str) -> str:
    """Add both numbers of the question, read the counter, and say it."""
    numbers = re.findall(r"add (\d+)", conversation.partition("<|im_start|>user")[2])
    turn = conversation.count("<|im_start|>assistant")
    if turn == 1:
        return "\n".join(write_call("increment_counter", count=int(number)) for number in numbers[:2])
    if turn == 2:
        return write_call("get_counter_value")
    return "It is " + re.findall(r'"count": ?(\d+)', conversation)[-1]


def test_64_sessions_at_the_same_time_in_groups(shared: Serve, tmp_path: Path) -> None:
    url = shared("nemo-gym", SERVER, "counter").url
    tasks = rows(tmp_path, "example_session_state_mgmt", 5)
    rollouts = play(partial(NemoGymEnv, url), count_as_asked, [*tasks] * 2, group=7)[:64]
    assert len(rollouts) == 64
    assert [rollout.failure for rollout in rollouts if rollout.failure is not None] == []
    assert {rollout.reward for rollout in rollouts} == {1.0}, "each counter is of one session"
    assert rollouts[0].metrics == {"turns": 3.0, "calls": 3.0, "faulty_calls": 0.0}
    assert '"success":true' in rollouts[0].turns[0].observation.replace(" ", "")
    lazy = play(partial(NemoGymEnv, url), lambda conversation: "I do not count.", [tasks[0]])
    assert lazy[0].reward == 0.0


def test_calls_in_the_response_are_verified(shared: Serve, tmp_path: Path) -> None:
    url = shared("nemo-gym", SERVER, "synonyms").url
    tasks = rows(tmp_path, "example_multi_step", 4)
    expected = {task.question: task.metadata["row"]["expected_synonym_values"] for task in tasks}

    def extract(conversation: str) -> str:
        (values,) = [values for question, values in expected.items() if question in conversation]
        turn = conversation.count("<|im_start|>assistant")
        return write_call("extract_synonym_values", synonym_values=values) if turn == 1 else "Done."

    rollouts = play(partial(NemoGymEnv, url), extract, list({task.question: task for task in tasks}.values()))
    assert {rollout.reward for rollout in rollouts} == {1.0}
    (rollout,) = play(partial(NemoGymEnv, url, max_steps=1), extract, [tasks[0]])
    assert (rollout.reward, rollout.stop_reason) == (1.0, StopReason.TRUNCATED)


def faulty_row(name: str) -> Task:
    parameters = {"type": "object", "properties": {"status": {"type": "integer"}}}
    tool = {"type": "function", "name": "fail", "strict": False, "parameters": parameters}
    return row_task(name, {"responses_create_params": {"input": [{"role": "user", "content": "Go."}], "tools": [tool]}})


def test_errors_of_tools_are_read_by_the_policy_and_lost_judges_are_failures(shared: Serve) -> None:
    url = shared("nemo-gym", SERVER, "faulty").url

    def after(status: int, answer: str) -> Any:
        return lambda text: write_call("fail", status=status) if text.count("<|im_start|>assistant") == 1 else answer

    (rollout,) = play(partial(NemoGymEnv, url), after(500, "right"), [faulty_row("t")])
    assert rollout.failure is None, rollout.failure
    assert (rollout.reward, rollout.metrics["faulty_calls"]) == (1.0, 1.0)
    assert "no luck" in rollout.turns[0].observation
    (rollout,) = play(partial(NemoGymEnv, url, tool_errors="fail"), after(500, "right"), [faulty_row("t")])
    assert rollout.failure is not None
    assert re.search("the tool fail failed: HTTP 500", rollout.failure.message)
    (rollout,) = play(partial(NemoGymEnv, url), after(400, "lost"), [faulty_row("t")])
    assert rollout.failure is not None
    assert rollout.dropped
    assert "its reward measures nothing: judge_unavailable: no judge" in rollout.failure.message


def test_a_lost_server_is_a_failure_with_address_and_task(serve: Serve) -> None:
    url = serve("nemo-gym", SERVER, "faulty").url
    tasks = [faulty_row(f"t{number}") for number in range(64)]
    env = partial(NemoGymEnv, url, attempts=1)
    rollouts = play(env, lambda text: write_call("fail", status=0), tasks)
    assert {rollout.failure.kind for rollout in rollouts if rollout.failure is not None} == {FailureKind.ENVIRONMENT}
    assert all(rollout.failure is not None for rollout in rollouts)
    assert all(rollout.dropped for rollout in rollouts)
    messages = [rollout.failure.message for rollout in rollouts if rollout.failure is not None]
    assert all(f"env.options.url={url}, task t" in message for message in messages)
    (rollout,) = play(env, lambda text: "right", tasks[:1])
    assert rollout.failure is not None
    assert "task t0: the session did not start" in rollout.failure.message


def test_contract(shared: Serve) -> None:
    url = shared("nemo-gym", SERVER, "faulty").url
    assert check_env(partial(NemoGymEnv, url), task=faulty_row("t")) == ()
