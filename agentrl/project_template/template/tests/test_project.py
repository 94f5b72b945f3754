"""The environment and its tool keep agentrl's contracts, and episodes go as they should. No model is trained."""

import asyncio

from agentrl import StopReason, Task, ToolCall, ToolResult
from agentrl.testing import check_env, check_tool, play_episode

from my_package.env import DirectoryEnv
from my_package.tasks import DIRECTORIES, People
from my_package.tools import look_up


def respond(call: ToolCall) -> ToolResult:
    return asyncio.run(look_up.run(call))


def task_with(lookups: int) -> Task:
    return next(task for task in People().split("eval") if task.metadata["lookups"] == lookups)


def test_the_environment_keeps_the_contract() -> None:
    check_env(DirectoryEnv)  # with a tool that fails
    check_env(DirectoryEnv, task=task_with(1), respond=respond)


def test_the_tool_keeps_the_contract() -> None:
    check_tool(look_up, {"name": next(iter(DIRECTORIES["train"]))})


def test_the_tool_answers_an_unknown_name_with_an_error() -> None:
    assert respond(ToolCall("1", "look_up", {"name": "Nobody"})).status == "error"


def test_questions_of_training_and_evaluation_are_about_different_people() -> None:
    train, held_out = People().split("train"), People().split("eval")
    assert len({task.id for task in [*train, *held_out]}) == len(train) + len(held_out)
    assert not set(DIRECTORIES["train"]) & set(DIRECTORIES["eval"])


def test_a_right_answer_after_two_lookups_is_worth_one() -> None:
    task = task_with(2)
    person = task.question.removesuffix("?").partition("spouse of ")[2]
    says = [
        f"<think> spouse </think><search> {person} </search>",
        f"<think> the next </think><search> {DIRECTORIES['eval'][person]['spouse']} </search>",
        f"<think> answer </think><answer> {task.answer} </answer>",
    ]
    rollout = play_episode(DirectoryEnv, task, says)
    assert rollout.failure is None
    assert (rollout.reward, rollout.stop_reason) == (1.0, StopReason.TERMINATED)
    assert rollout.metrics == {"right": 1.0, "lookups": 2.0}
    assert f"is married to {person}" in rollout.turns[1].observation


def test_a_wrong_answer_is_worth_nothing_and_babble_ends_the_episode() -> None:
    wrong = play_episode(DirectoryEnv, task_with(1), ["<answer> Nowhere </answer>"])
    assert (wrong.reward, wrong.stop_reason) == (0.0, StopReason.TERMINATED)
    babble = play_episode(DirectoryEnv, task_with(1), ["Tamo Rilek"])
    assert (babble.reward, babble.stop_reason) == (0.0, StopReason.TERMINATED)
