"""The environment of container tasks. No server and no machine: results are handed in as the runner would."""

import json
from typing import Any

import pytest
from agentrl_envs.terminal import TerminalEnv
from agentrl_envs.terminal.env import NO_CALLS_LEFT
from agentrl_envs.terminal.protocol import parse_command
from PIL import Image as pil

from agentrl.core.errors import ConfigError, TaskError, ToolFailure
from agentrl.core.images import IMAGE_MARK, load_image
from agentrl.core.task import Task
from agentrl.core.types import CallStatus, Message, ToolCall, ToolCalls, ToolResult, ToolResults, ToolStatus

TASK = Task("t", (Message("user", "Fix it."),), metadata={"task_folder": "/tasks/t"})
DONE = Message("assistant", "Done.")
OPEN = {"instruction": "Fix it.", "steps": 2, "machine": {"container": "c"}, "tools": []}
GRADE = {
    "rewards": {"reward": 1.0},
    "task_rewards": {"reward": 1.0},
    "reward": 1.0,
    "instruction": None,
    "machine": None,
    "forgeable": False,
    "at_limit": False,
    "refused": {"/app/conftest.py": "tools load it by themselves"},
}


def call_of(observation: object) -> ToolCall:
    assert isinstance(observation, ToolCalls)
    [call] = observation.calls
    return call


def result(call: ToolCall, content: str = "", status: ToolStatus = ToolStatus.OK, data: Any = None) -> ToolResults:
    return ToolResults((ToolResult(call.id, status, content, data),))


def begin(**options: Any) -> tuple[TerminalEnv, tuple[Message, ...]]:
    env = TerminalEnv(**options)
    observation, _ = env.reset(seed=0, options={"task": TASK})
    call = call_of(observation)
    assert (call.name, call.arguments) == ("terminal", {"action": "open", "folder": "/tasks/t"})
    messages, *_ = env.step(result(call, data=OPEN))
    assert isinstance(messages, tuple)
    return env, messages


def bash(call_id: str, command: str, status: CallStatus = CallStatus.OK, name: str = "bash") -> ToolCall:
    return ToolCall(call_id, name, {"command": command}, status, "" if status is CallStatus.OK else "no JSON")


def test_commands_run_one_after_the_other_and_keep_the_policys_ids() -> None:
    env, [prompt] = begin()
    assert "Fix it." in prompt.content
    calls = (
        bash("a", "ls"),
        bash("b", "", CallStatus.INVALID_JSON),
        bash("c", "terminal", name="terminal"),
        bash("d", "pwd"),
    )
    first = call_of(env.step(Message("assistant", "", calls))[0])
    assert (first.name, first.arguments) == ("bash", {"command": "ls"})
    second = call_of(env.step(result(first, "a.txt", data={"is_cut": True}))[0])
    assert second.arguments == {"command": "pwd"}
    assert first.id != second.id
    answers, reward, terminated, truncated, info = env.step(result(second, "/app", ToolStatus.ERROR))
    assert isinstance(answers, tuple)
    assert [(answer.tool_call_id, answer.content) for answer in answers] == [
        ("a", "a.txt"), ("b", "no JSON"), ("c", "there is no tool 'terminal'"), ("d", "/app")
    ]  # fmt: skip
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info["metrics"] == {"commands": 2.0, "failed_commands": 1.0, "timeouts": 0.0, "cut_outputs": 1.0}


MCP_TOOL = {
    "name": "docs_find",
    "description": "Find a page.",
    "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    "server": "docs",
    "tool": "find",
}


def test_tools_of_the_tasks_mcp_servers_are_offered_next_to_bash() -> None:
    env = TerminalEnv()
    observation, _ = env.reset(seed=0, options={"task": TASK})
    env.step(result(call_of(observation), data={**OPEN, "tools": [MCP_TOOL]}))
    assert [(tool.name, tool.server) for tool in env.tools] == [("bash", "terminal"), ("docs_find", "terminal")]
    turn = Message("assistant", "", (ToolCall("a", "docs_find", {"text": "x"}), bash("b", "ls")))
    first = call_of(env.step(turn)[0])
    assert (first.name, first.arguments) == (
        "terminal", {"action": "call", "server": "docs", "tool": "find", "arguments": {"text": "x"}}
    )  # fmt: skip
    resumed = TerminalEnv()
    resumed.reset(seed=0, options={"task": TASK})
    assert len(resumed.tools) == 1
    resumed.set_state(json.loads(json.dumps(env.get_state())))
    assert [tool.name for tool in resumed.tools] == ["bash", "docs_find"]
    second = call_of(resumed.step(result(first, "page 3"))[0])
    answers, *_ = resumed.step(result(second, "a.txt"))
    assert isinstance(answers, tuple)
    assert [answer.content for answer in answers] == ["page 3", "a.txt"]
    assert call_of(resumed.step(DONE)[0]).arguments["calls"] == 2
    resumed.reset(seed=0, options={"task": TASK})
    assert len(resumed.tools) == 1, "those of another task"


def test_pictures_of_mcp_servers_are_in_the_answer_to_their_call_also_of_a_saved_episode() -> None:
    env = TerminalEnv()
    observation, _ = env.reset(seed=0, options={"task": TASK})
    env.step(result(call_of(observation), data={**OPEN, "tools": [MCP_TOOL]}))
    turn = Message("assistant", "", (ToolCall("a", "docs_find", {"text": "x"}), bash("b", "ls")))
    first = call_of(env.step(turn)[0])
    picture = load_image(pil.new("RGB", (2, 3), "red"))
    page = ToolResult(first.id, ToolStatus.OK, f"page {IMAGE_MARK} 3", None, (picture,))
    second = call_of(env.step(ToolResults((page,)))[0])
    resumed = TerminalEnv()
    resumed.reset(seed=0, options={"task": TASK})
    resumed.set_state(json.loads(json.dumps(env.get_state())))
    for played in (env, resumed):
        answers, *_ = played.step(result(second, "a.txt"))
        assert isinstance(answers, tuple)
        assert [(answer.content, answer.images) for answer in answers] == [
            (f"page {IMAGE_MARK} 3", (picture,)),
            ("a.txt", ()),
        ]


def test_an_agent_program_connects_to_the_tasks_mcp_servers_itself() -> None:
    observation, _ = TerminalEnv(protocol="program").reset(seed=0, options={"task": TASK})
    assert call_of(observation).arguments["connect"] is False


def test_mcp_servers_need_the_protocol_of_tools() -> None:
    env = TerminalEnv(protocol="text")
    observation, _ = env.reset(seed=0, options={"task": TASK})
    with pytest.raises(TaskError, match=r"need env\.options\.protocol=tools"):
        env.step(result(call_of(observation), data={**OPEN, "tools": [MCP_TOOL]}))


def test_a_turn_without_a_command_is_graded() -> None:
    env, _ = begin()
    call = call_of(env.step(DONE)[0])
    assert call.arguments == {"action": "grade", "step": 0, "rewards": [], "calls": 0}
    observation, reward, terminated, _, info = env.step(result(call, data={**GRADE, "forgeable": True}))
    assert (observation, reward, terminated) == ((), 1.0, True)
    assert info["metrics"]["forgeable"] == info["metrics"]["refused_files"] == info["metrics"]["reward_reward"] == 1.0


def test_the_text_protocol() -> None:
    env, [prompt] = begin(protocol="text")
    assert env.stop == ("</bash>",)
    assert not env.tools
    assert "<bash>" in prompt.content
    call = call_of(env.step(Message("assistant", "I look.\n<bash>ls</bash>"))[0])
    answers, *_ = env.step(result(call, "a.txt\n"))
    assert answers == (Message("user", "<output>\na.txt\n</output>"),)
    assert call_of(env.step(DONE)[0]).arguments["calls"] == 1


@pytest.mark.parametrize(
    ("content", "command"),
    [
        ("<bash>ls</bash>", "ls"),
        ("a <bash>x</bash> <bash>y</bash>", "x"),
        ("<bash><bash> a\nb </bash>", "a\nb"),
        ("<bash> </bash>", None),
        ("<bash>ls", None),
        ("ls</bash>", None),
        ("", None),
    ],
)
def test_the_command_of_a_turn(content: str, command: str | None) -> None:
    assert parse_command(content) == command


def test_steps_follow_each_other_and_the_rewards_of_all_are_handed_on() -> None:
    env, _ = begin()
    first = call_of(env.step(DONE)[0])
    [message], *_ = env.step(result(first, data={**GRADE, "instruction": "Now more."}))  # type: ignore[misc]
    assert "Now more." in message.content
    second = call_of(env.step(DONE)[0])
    assert second.id != first.id
    assert second.arguments == {"action": "grade", "step": 1, "rewards": [{"reward": 1.0}], "calls": 0}
    _, reward, terminated, _, info = env.step(result(second, data={**GRADE, "reward": 0.5}))
    assert (reward, terminated, info["metrics"]["steps"]) == (0.5, True, 2.0)


def test_after_the_last_command_the_policy_is_told_once_and_then_graded() -> None:
    env, _ = begin(max_commands=1)
    call = call_of(env.step(Message("assistant", "", (bash("a", "ls"), bash("b", "ls"))))[0])
    answers, *_ = env.step(result(call, "x"))
    assert isinstance(answers, tuple)
    assert [answer.content for answer in answers] == ["x", NO_CALLS_LEFT]
    assert call_of(env.step(Message("assistant", "", (bash("c", "ls"),)))[0]).arguments["action"] == "grade"


def test_a_limit_of_the_run_ends_with_a_grade() -> None:
    env, _ = begin()
    env.step(Message("assistant", "", (bash("a", "sleep 100"),)))
    call = call_of(env.truncate())
    assert "calls" not in call.arguments, "a command may have been on its way"
    _, reward, terminated, _, _ = env.step(result(call, data={**GRADE, "instruction": "Now more."}))
    assert (reward, terminated) == (1.0, True), "no further step begins"
    unopened = TerminalEnv()
    unopened.reset(options={"task": TASK})
    assert unopened.truncate()[0] == 0.0  # type: ignore[index]


def test_a_grade_that_failed_is_no_reward_of_zero() -> None:
    env, _ = begin()
    call = call_of(env.step(DONE)[0])
    with pytest.raises(ToolFailure, match="daemon"):
        env.step(result(call, "the daemon is gone", ToolStatus.ERROR))


def test_a_saved_episode_goes_on_with_its_machine() -> None:
    env, _ = begin()
    call = call_of(env.step(Message("assistant", "", (bash("a", "ls"),)))[0])
    env.step(result(call, "x"))
    state = json.loads(json.dumps(env.get_state()))
    resumed = TerminalEnv()
    resumed.reset(seed=1, options={"task": TASK})
    resumed.set_state(state)
    step = Message("assistant", "", (bash("b", "pwd"),))
    assert call_of(resumed.step(step)[0]) == call_of(env.step(step)[0])
    assert call_of(begin()[0].step(step)[0]).id.partition("-")[0] != call.id.partition("-")[0], (
        "another episode, another machine"
    )


def test_options_and_tasks_are_checked() -> None:
    for options in ({"protocol": "xml"}, {"max_commands": 0}, {"prompt": "x"}):
        with pytest.raises(ConfigError, match=f"env.options.{next(iter(options))}"):
            TerminalEnv(**options)  # type: ignore[arg-type]
    with pytest.raises(TaskError, match="task_folder"):
        TerminalEnv().reset(options={"task": Task("t", (Message("user", "x"),))})
