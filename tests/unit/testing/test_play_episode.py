"""play_episode: an episode by script, as in training, in which nothing that fails goes unseen."""

import pytest

from agentrl import Env, Message, Task, ToolCall, ToolCalls, ToolResults, tool
from agentrl.core.env import Step
from agentrl.core.errors import RunStopped
from agentrl.core.types import Action, StopReason
from agentrl.testing import check_env, play_episode

TASK = Task("double/3", (Message("user", "3"),), answer="6")


@tool(timeout_s=5)
async def double(number: int) -> str:
    """Double a number."""
    return str(2 * number)


class Doubling(Env):
    """Doubles what the policy says with its own tool; ends when told the answer."""

    tools = (double,)

    def step(self, action: Action) -> Step:
        if isinstance(action, ToolResults):
            return (Message("user", action.results[0].content),), 0.0, False, False, {}
        if action.content.isdigit():
            call = ToolCall(f"c{len(action.content)}", "double", {"number": int(action.content)})
            return ToolCalls((call,)), 0.0, False, False, {}
        right = float(action.content == f"is {self.task.answer}")
        return (), right, True, False, {"metrics": {"right": right}}


class Broken(Doubling):
    def step(self, action: Action) -> Step:
        raise ZeroDivisionError("no step")


def test_the_environments_own_tool_runs_and_only_what_was_said_is_trained_on() -> None:
    """prompt | "3", end token | boundary, "6", boundary | "is 6", end token."""
    rollout = play_episode(Doubling, TASK, ["3", "is 6"])
    assert (rollout.reward, rollout.stop_reason) == (1.0, StopReason.TERMINATED)
    assert [(turn.action, turn.observation) for turn in rollout.turns] == [("3", "6"), ("is 6", "")]
    [row] = rollout.rows
    assert int(row.mask.sum()) == rollout.sampled_tokens
    assert 0 < rollout.sampled_tokens < len(row.token_ids)


def test_the_turns_are_limited() -> None:
    rollout = play_episode(Doubling, TASK, ["3"], max_turns=1)
    assert (rollout.reward, rollout.stop_reason) == (0.0, StopReason.MAX_TURNS)


def test_a_failure_is_raised_with_its_own_words() -> None:
    with pytest.raises(RunStopped, match="ZeroDivisionError: no step"):
        play_episode(Broken, TASK, ["3"])


def test_an_environments_own_tool_may_be_called() -> None:
    check_env(Doubling, task=TASK)
