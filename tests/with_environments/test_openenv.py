"""OpenEnv's servers of two releases, each a process with its own packages, and episodes of the adapter at them."""

import json
import re
import subprocess
from functools import partial
from pathlib import Path

import pytest
from adapter_episodes import bisect, play

from agentrl import Message, Task
from agentrl.adapters.openenv import OpenEnv
from agentrl.core.errors import MissingError, UnknownNameError
from agentrl.core.types import FailureKind, StopReason
from agentrl.testing import check_env
from tests.with_environments.conftest import Serve, python_of

pytestmark = pytest.mark.environments
RELEASES = ["openenv-0.3", "openenv-0.10"]
SERVER = "openenv_server.py"


def seeded(count: int) -> list[Task]:
    return [Task(f"openenv/train/{number}", ()) for number in range(count)]


@pytest.mark.parametrize("release", RELEASES)
def test_64_episodes_at_the_same_time_in_groups(shared: Serve, release: str) -> None:
    url = shared(release, SERVER, "guess", 64).url
    rollouts = play(partial(OpenEnv, url), bisect, seeded(8), group=8)
    assert len(rollouts) == 64
    assert all(rollout.failure is None for rollout in rollouts), rollouts[0].failure
    assert all(rollout.stop_reason is StopReason.TERMINATED for rollout in rollouts)
    assert {round(rollout.reward, 2) for rollout in rollouts} <= {1 + hints / 100 for hints in range(8)}
    for start in range(0, 64, 8):
        members = rollouts[start : start + 8]
        assert len({tuple(turn.observation for turn in rollout.turns) for rollout in members}) == 1, (
            "one seed, one number"
        )
    assert len({rollouts[start].reward for start in range(0, 64, 8)}) > 1


@pytest.mark.parametrize("release", RELEASES)
def test_a_full_server_is_waited_for(serve: Serve, release: str) -> None:
    server = serve(release, SERVER, "guess", 16)
    rollouts = play(partial(OpenEnv, server.url), bisect, seeded(64))
    assert [rollout.failure for rollout in rollouts if rollout.failure is not None] == []
    (rollout,) = _while_full(serve(release, SERVER, "guess", 1).url)
    assert rollout.failure is not None
    pattern = (
        r"train/1: the server is full \(Server at capacity: 1/1 .* for env\.options\.capacity_wait_s=0\.1; raise its"
    )
    assert re.search(pattern, rollout.failure.message)


def _while_full(url: str):
    holder = OpenEnv(url)
    holder.reset(seed=0)
    try:
        return play(partial(OpenEnv, url, capacity_wait_s=0.1), bisect, seeded(2)[1:])
    finally:
        holder.close()


@pytest.mark.parametrize("release", RELEASES)
def test_a_lost_server_is_a_failure_with_address_and_task_and_no_reward(serve: Serve, release: str) -> None:
    server = serve(release, SERVER, "guess", 64)

    def guess_twice(conversation: str) -> str:
        return "die" if conversation.count("assistant") == 3 and "Bye." in conversation else "no number"

    tasks = [Task("openenv/bye", (Message("user", "Bye."),)), *seeded(63)]
    rollouts = play(partial(OpenEnv, server.url, attempts=2), guess_twice, tasks)
    failures = [rollout.failure for rollout in rollouts if rollout.failure is not None]
    assert failures
    assert all(rollout.dropped for rollout in rollouts if rollout.failure is not None)
    assert {failure.kind for failure in failures} == {FailureKind.ENVIRONMENT}
    pattern = rf"the OpenEnv server env\.options\.url={server.url}, task openenv/bye: the connection was lost .* after 2 steps;"
    assert any(re.search(pattern, failure.message) for failure in failures)
    (rollout,) = play(partial(OpenEnv, server.url, attempts=2), bisect, seeded(1))
    assert rollout.failure is not None
    assert re.search(rf"{server.url}, task openenv/train/0: .*no connection .* of 2 attempts", rollout.failure.message)
    with pytest.raises(
        MissingError, match=rf"the tasks of env\.name=openenv: {server.url}/list_environments: no connection"
    ):
        OpenEnv.configured_tasks("train", 0, {"url": server.url, "attempts": 1})


@pytest.mark.parametrize("release", RELEASES)
def test_errors_of_the_environment_are_failures_or_shown(shared: Serve, release: str) -> None:
    url = shared(release, SERVER, "guess", 64).url

    def crash_first(conversation: str) -> str:
        return bisect(conversation) if "no such guess" in conversation else "crash"

    (rollout,) = play(partial(OpenEnv, url), crash_first, seeded(1))
    assert rollout.failure is not None
    assert "step 1 failed at the server: EXECUTION_ERROR: no such guess; env.options.execution_errors=show" in (
        rollout.failure.message
    )
    (rollout,) = play(partial(OpenEnv, url, execution_errors="show", invalid_cost=0.5), crash_first, seeded(1))
    assert rollout.failure is None
    assert rollout.turns[0].observation == "That is no action: no such guess."
    assert rollout.metrics["invalid_turns"] == 1.0
    assert 0.5 <= rollout.reward < 0.6


@pytest.mark.parametrize("release", RELEASES)
def test_tools_of_an_mcp_environment(shared: Serve, release: str) -> None:
    url = shared(release, SERVER, "counter", 64).url

    def count(conversation: str) -> str:
        goal = re.search(r"total to (\d+)", conversation)
        assert goal is not None
        turn = conversation.count("<|im_start|>assistant")
        calls = (
            [("add", {"number": -1}), ("add", {"number": int(goal[1]) - 1})] if turn == 1 else [("add", {"number": 1})]
        )
        if turn == 3:
            calls = [("submit", {})]
        return "\n".join(
            f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
            for name, arguments in calls
        )

    rollouts = play(partial(OpenEnv, url), count, seeded(64))
    assert all(rollout.failure is None for rollout in rollouts), rollouts[0].failure
    assert {rollout.reward for rollout in rollouts} == {1.0}
    first = rollouts[0].turns[0].observation
    assert "no negative numbers" in first
    assert "The total is" in first
    assert rollouts[0].metrics == {"steps": 4.0, "invalid_turns": 0.0}
    (rollout,) = play(partial(OpenEnv, url), lambda conversation: "I give up.", seeded(1))
    assert (rollout.reward, rollout.stop_reason) == (0.0, StopReason.TERMINATED)


@pytest.mark.parametrize("transport", ["websocket", "http"])
@pytest.mark.parametrize("release", RELEASES)
def test_actions_of_several_fields_over_both_transports(shared: Serve, release: str, transport: str) -> None:
    url = shared(release, SERVER, "grid", 64).url

    def move(conversation: str) -> str:
        x = 12 if conversation.count("<|im_start|>assistant") == 1 else 7
        return f'<action>{{"x": {x}, "y": 1}}</action>'

    rollouts = play(partial(OpenEnv, url, transport=transport, observation="row"), move, seeded(64))
    assert {rollout.reward for rollout in rollouts} == {0.7}
    assert rollouts[0].turns[0].observation.startswith("That is no action: ['x']: 12 is greater than the maximum of 9.")
    assert rollouts[0].turns[1].observation == "[7, 1]"


def test_the_task_api_chooses_the_tasks(shared: Serve) -> None:
    options = {"url": shared("openenv-0.10", SERVER, "guess", 64).url}
    held_out = OpenEnv.configured_tasks("eval", 0, options)
    assert [len(OpenEnv.configured_tasks("train", 0, options)), len(held_out)] == [50, 7]
    assert held_out[3].id == "openenv/GuessEnvironment/held_out/3"
    rollouts = play(partial(OpenEnv, options["url"], reset={"greeting": "Find"}), lambda text: "83", list(held_out)[:4])
    assert [rollout.reward >= 1.0 for rollout in rollouts] == [False, False, False, True], (
        "the number is 80 and the index"
    )
    with pytest.raises(UnknownNameError, match=r"unknown split of the OpenEnv server 'test'.*held_out, train"):
        OpenEnv.configured_tasks("test", 0, options)


def test_a_server_without_a_task_api_has_seeded_tasks(shared: Serve) -> None:
    for release, kind in (("openenv-0.3", "guess"), ("openenv-0.10", "grid")):
        tasks = OpenEnv.configured_tasks("train", 0, {"url": shared(release, SERVER, kind, 64).url})
        assert (len(tasks), tasks[5].id) == (1000, "openenv/train/5")


@pytest.mark.parametrize("release", RELEASES)
def test_contract(shared: Serve, release: str) -> None:
    assert check_env(partial(OpenEnv, shared(release, SERVER, "guess", 64).url)) == ()


@pytest.mark.parametrize("release", RELEASES)
def test_openenvs_own_client_reads_the_same(shared: Serve, release: str) -> None:
    url = shared(release, SERVER, "guess", 64).url
    guesses = ["50", "x", "99", "1"]
    client = Path(__file__).with_name("openenv_client.py")
    actions = [json.dumps({"text": guess}) for guess in guesses]
    command = [str(python_of(release)), str(client), url, json.dumps({"seed": 1, "episode_id": "a"}), *actions]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    env = OpenEnv(url, reset={"seed": 1})
    (message,), _ = env.reset(seed=0)
    replies = [(message.content, 0.0, False)]
    for guess in guesses:
        (message,), reward, terminated, _, _ = env.step(Message("assistant", guess))
        replies.append((message.content, reward, terminated))
    env.close()
    theirs = [(observation["hint"], reward or 0.0, done) for observation, reward, done in map(json.loads, lines)]
    assert replies == theirs
