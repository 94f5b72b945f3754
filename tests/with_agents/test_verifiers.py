"""Environments of verifiers itself, installed in an environment of its own: one turn, several, tools, and failures."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from verifiers_episodes import play_tasks, policy_texts

from agentrl import ConfigError, Task
from agentrl.adapters.verifiers import VerifiersEnv
from agentrl.adapters.verifiers.process import verifiers_process
from agentrl.batch.provenance import check_rows

pytestmark = [pytest.mark.agents, pytest.mark.parametrize("bin_folder", ["verifiers"], indirect=True)]
ENVIRONMENTS = Path(__file__).parent / "verifiers_envs"


@pytest.fixture
def python(bin_folder: Path) -> Iterator[str]:
    path = str(bin_folder / "python")
    yield path
    verifiers_process(path).close()


def tasks_of(python: str, name: str, **options: Any) -> list[Task]:
    options = {"id": str(ENVIRONMENTS / f"{name}.py"), "python": python, **options}
    return [*VerifiersEnv.configured_tasks("train", 0, options)]


def number(prompt: str) -> str:
    return prompt.rpartition("Say ")[2].partition(".")[0]


def test_one_turn(python: str) -> None:
    tasks = tasks_of(python, "single_turn_env", eval_size=6)
    assert len(tasks) == 64
    rollouts, sampler = asyncio.run(play_tasks(tasks, lambda prompt: f"It is {number(prompt)}."))
    assert [rollout.failure for rollout in rollouts] == [None] * 64
    assert [rollout.reward for rollout in rollouts] == [1.0] * 64
    assert rollouts[-1].metrics == {"reward/exact": 1.0, "characters": 9.0}
    assert [policy_texts(rollout) for rollout in rollouts[:2]] == [["It is 6."], ["It is 7."]]
    for rollout in rollouts:
        check_rows(rollout.rows)
    assert sampler.max_running > 1


def test_several_turns_are_one_row(python: str) -> None:
    tasks = tasks_of(python, "multi_turn_env")[:2]
    (right, wrong), _ = asyncio.run(
        play_tasks(tasks, lambda prompt: number(prompt) if "And again?" in prompt and "Say 35." in prompt else "?")
    )
    assert [policy_texts(rollout) for rollout in (right, wrong)] == [["?", "35"], ["?", "?"]]
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert "And again?" in right.turns[0].observation
    assert len(right.rows) == 1


def test_tools_are_called_over_mcp(python: str) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 40}}</tool_call>'
    tasks = tasks_of(python, "tool_env")[:1]
    assert tasks[0].question == "Add 2 and 40."
    (rollout,), _ = asyncio.run(play_tasks(tasks, lambda prompt: "It is 42." if "42" in prompt else call))
    assert rollout.failure is None
    assert rollout.reward == 1.0
    assert policy_texts(rollout) == [call, "It is 42."]
    assert "42" in rollout.turns[0].observation


def test_an_exception_of_a_reward_function_is_a_failure_and_no_reward(python: str) -> None:
    (rollout,), _ = asyncio.run(play_tasks(tasks_of(python, "single_turn_env")[:1], lambda prompt: "boom"))
    assert rollout.failure is not None
    assert rollout.failure.kind == "environment"
    assert "the reward function broke" in rollout.failure.message
    assert rollout.dropped


def test_the_harness_of_verifiers_plays_as_a_program_of_its_own(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``null``: verifiers starts it by uv, which installs what it needs; its requests go through the gateway."""
    monkeypatch.setenv("UV_FIND_LINKS", str(Path(python).parents[1] / "wheels"))
    monkeypatch.setenv("UV_DEFAULT_INDEX", (Path(python).parents[1] / "wheels").as_uri())
    tasks = tasks_of(python, "null_env", config={"agent": {"harness": {"id": "null"}}})[:3]
    (right, *others), sampler = asyncio.run(
        play_tasks(tasks, lambda prompt: f"It is {number(prompt)}." if "Say 4." in prompt else "No.")
    )
    assert [rollout.failure for rollout in (right, *others)] == [None] * 3
    assert [rollout.reward for rollout in (right, *others)] == [1.0, 0.0, 0.0]
    assert policy_texts(right) == ["It is 4."]
    check_rows(right.rows)
    assert len(sampler.requests) == 3


def test_a_lost_engine_is_not_noticed_by_verifiers(python: str) -> None:
    tasks = tasks_of(python, "multi_turn_env")[:4]
    rollouts, _ = asyncio.run(play_tasks(tasks, number, lost=["engine-0"]))
    assert [rollout.failure for rollout in rollouts] == [None] * 4
    assert [policy_texts(rollout) for rollout in rollouts] == [[str(35 + n), str(35 + n)] for n in range(4)]


def test_engines_that_are_lost_for_good_are_named_and_no_fault_of_the_policy(python: str) -> None:
    tasks = tasks_of(python, "single_turn_env")[:2]
    rollouts, _ = asyncio.run(play_tasks(tasks, number, lost=["engine-last"]))
    for rollout in rollouts:
        assert rollout.failure is not None
        assert (rollout.failure.kind, rollout.dropped) == ("sampler", True)
        assert "no engine is left. engine-last ended with signal 9" in rollout.failure.message


def test_what_verifiers_refuses_is_named(python: str) -> None:
    with pytest.raises(
        ConfigError, match=r"env\.options\.id=nothing: ModuleNotFoundError: taskset 'nothing' not found"
    ):
        tasks_of(python, "x", id="nothing")
    with pytest.raises(ConfigError, match=r"(?s)speakers"):
        tasks_of(python, "multi_turn_env", config={"speakers": {}})
