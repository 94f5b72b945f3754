"""Whole episodes of python_math in the chat format of the small policies, with a tool server's client that is a fake."""

import json
from pathlib import Path

import numpy as np
import pytest
from agentrl_envs.python_math import PythonMathEnv
from agentrl_tasks.small_policy import save_tokenizer

from agentrl import Message, Rollout, Task, ToolCall, ToolResult, ToolStatus
from agentrl.core.errors import RunStopped, ToolFailure
from agentrl.core.types import Provenance, StopReason
from agentrl.testing import play_episode

TASK = Task("t", (Message("user", "What is 2 times 21?"),), answer="42")


class Python:
    """A client whose server knows one program."""

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []
        self.closed: list[str] = []

    async def call(self, call: ToolCall, *, episode_id: str) -> ToolResult:
        self.calls.append(call)
        if call.arguments["code"] == "print(2 * 21)":
            return ToolResult(call.id, ToolStatus.OK, "42")
        raise ToolFailure("the server is gone")

    async def close_session(self, episode_id: str) -> None:
        self.closed.append(episode_id)

    async def aclose(self) -> None:
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(Path(folder), ["What is 2 times 21?"])
    (folder / "config.json").write_text("{}")
    return str(folder)


def call(code: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': code}})}\n</tool_call>"


def play(model: str, client: Python, *turns: str) -> Rollout:
    def env() -> PythonMathEnv:
        return PythonMathEnv(prompt="{question}", max_tool_calls=2)

    return play_episode(env, TASK, list(turns), model=model, tool_clients={"python": client})


def test_an_episode_with_a_call(model: str) -> None:
    """Layout: prompt | call <|im_end|> | result turn, opener | answer <|im_end|>: the second and fourth are trained."""
    client = Python()
    rollout = play(model, client, call("print(2 * 21)"), "\\boxed{42}")
    assert (rollout.reward, rollout.stop_reason) == (1.0, StopReason.TERMINATED)
    assert rollout.metrics == {
        "tool_calls": 1.0,
        "tool_errors": 0.0,
        "tool_timeouts": 0.0,
        "answered": 1.0,
        "correct": 1.0,
    }
    assert [call.arguments for call in client.calls] == [{"code": "print(2 * 21)"}]
    assert len(client.closed) == 1
    assert [turn.observation for turn in rollout.turns] == ["42", ""]
    (row,) = rollout.rows
    assert np.array_equal(row.mask == 1, row.provenance == Provenance.SAMPLED)
    borders = np.flatnonzero(np.diff(row.mask.astype(int)))
    assert len(borders) == 3


def test_a_call_that_cannot_be_read_costs_a_call_and_reaches_no_server(model: str) -> None:
    client = Python()
    rollout = play(model, client, "<tool_call>\n{\n</tool_call>", call("print(2 * 21)"), call("print(2 * 21)"))
    assert (rollout.reward, rollout.stop_reason) == (0.0, StopReason.TRUNCATED)
    assert (rollout.metrics["tool_calls"], rollout.metrics["tool_errors"]) == (2.0, 1.0)
    assert len(client.calls) == 1


def test_a_server_that_fails_is_no_fault_of_the_policy(model: str) -> None:
    with pytest.raises(RunStopped, match="the server is gone"):
        play(model, Python(), call("print(1)"), "\\boxed{42}")
