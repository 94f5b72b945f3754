"""What the policy may do, and what its program earns. No server: results are handed in as the runner would."""

import json
from typing import Any

import pytest
from agentrl_envs.code_contest import CodeContestEnv
from agentrl_envs.code_contest.env import FAULTS, NO_TRIES
from agentrl_tools.judge import JudgeTool, Verdict

from agentrl.core.errors import ConfigError, TaskError, ToolFailure
from agentrl.core.task import Task
from agentrl.core.types import CallStatus, Message, ToolCall, ToolCalls, ToolResult, ToolResults, ToolStatus
from agentrl.rewards.programs import program_in

SECRET = "only-the-judge-knows-31337"
TASK = Task("t", (Message("user", "Print it."),), answer={"inputs": ["1\n", "2\n"], "outputs": [SECRET, SECRET]})
HANDS_IN = Message("assistant", "So:\n```python\nprint(1)\n```")


def begin(task: Task = TASK, **options: Any) -> CodeContestEnv:
    env = CodeContestEnv(**options)
    env.reset(seed=0, options={"task": task})
    return env


def tries(*calls: ToolCall) -> Message:
    return Message("assistant", "trying", tool_calls=calls)


def python(call_id: str, code: str = "1") -> ToolCall:
    return ToolCall(call_id, "python", {"code": code})


def verdicts(call_id: str, *names: str) -> ToolResults:
    return ToolResults((ToolResult(call_id, ToolStatus.OK, "", {"verdicts": list(names)}),))


@pytest.mark.parametrize(
    ("content", "program"),
    [
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("text\n```python\na\n```\nbetter:\n```py\nb\n\nc\n```\nbye", "b\n\nc\n"),
        ("  ```Python\n  x\n  ```", "  x\n"),
        ("```python\nx = '```'\n```", "x = '```'\n"),
        ("<think>```python\nno\n```</think>```python\nyes\n```", "yes\n"),
        ("<think>```python\nno\n```</think>", None),
        ("```python\nunfinished", None),
        ("```python\n \n```", None),
        ("```\nprint(1)\n```", None),
        ("```cpp\nint main;\n```", None),
        ("print(1)", None),
        ("", None),
    ],
)
def test_the_last_finished_block_is_the_program(content: str, program: str | None) -> None:
    assert program_in(content) == program


def test_a_program_is_judged_and_scored() -> None:
    env = begin()
    observation, reward, terminated, truncated, _ = env.step(HANDS_IN)
    assert isinstance(observation, ToolCalls)
    [call] = observation.calls
    assert (call.name, call.arguments) == (
        "judge",
        {"program": "print(1)\n", "stop_early": False, "compare": "tokens", **TASK.answer},
    )
    assert not JudgeTool().spec.schema_fault(call.arguments)
    assert (reward, terminated, truncated) == (0.0, False, False)
    observation, reward, terminated, truncated, info = env.step(verdicts(call.id, "accepted", "time_limit"))
    assert (observation, reward, terminated, truncated) == ((), 0.5, True, False)
    assert info["metrics"] == {
        "solved": 0.0, "passed": 0.5, "wrong_answer": 0.0, "runtime_error": 0.0, "time_limit": 0.5,
        "memory_limit": 0.0, "output_limit": 0.0, "has_program": 1.0, "tries": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "share", "everything"),
    [
        (("accepted", "accepted"), 1.0, 1.0),
        (("accepted", "not_run"), 0.5, 0.0),
        (("runtime_error", "not_run"), 0.0, 0.0),
    ],
)
def test_share_or_all(content: tuple[str, ...], share: float, everything: float) -> None:
    for scoring, expected in (("share", share), ("all", everything)):
        env = begin(scoring=scoring)
        observation, *_ = env.step(HANDS_IN)
        assert isinstance(observation, ToolCalls)
        assert observation.calls[0].arguments["stop_early"] is (scoring == "all")
        assert env.step(verdicts("judge", *content))[1] == expected


def test_every_verdict_has_a_figure() -> None:
    assert {*FAULTS, "accepted", "not_run"} == {verdict.value for verdict in Verdict}


def test_no_program_earns_nothing() -> None:
    for content in ("I give up.", "```python\nprint('\ud800')\n```"):
        observation, reward, terminated, _, info = begin().step(Message("assistant", content))
        assert (observation, reward, terminated) == ((), 0.0, True)
        assert info["metrics"]["has_program"] == 0.0


def test_code_may_be_tried_so_often() -> None:
    env = begin(max_tries=2)
    assert [tool.name for tool in env.tools] == ["python"]
    observation, reward, terminated, _, info = env.step(tries(python("a"), python("b"), python("c")))
    assert isinstance(observation, ToolCalls)
    assert [call.id for call in observation.calls] == ["a", "b"]
    assert (reward, terminated, info["metrics"]["tries"]) == (0.0, False, 2.0)
    results = ToolResults(tuple(ToolResult(i, ToolStatus.OK, f"out {i}") for i in "ab"))
    observation, *_ = env.step(results)
    assert observation == (
        Message("tool", "out a", tool_call_id="a"),
        Message("tool", "out b", tool_call_id="b"),
        Message("tool", NO_TRIES, tool_call_id="c"),
    )
    observation, _, terminated, *_ = env.step(tries(python("d")))
    assert observation == (Message("tool", NO_TRIES, tool_call_id="d"),)
    assert not terminated
    assert isinstance(env.step(HANDS_IN)[0], ToolCalls)


def test_without_tries_there_is_no_tool() -> None:
    assert begin(max_tries=0).tools == ()


@pytest.mark.parametrize("status", [CallStatus.UNKNOWN_TOOL, CallStatus.OK])
def test_the_policy_cannot_ask_the_judge(status: CallStatus) -> None:
    env = begin()
    assert "judge" not in [tool.name for tool in env.tools]
    call = ToolCall("a", "judge", {"program": "print(1)", **TASK.answer}, status, "no such tool" * (status != "ok"))
    observation, reward, terminated, *_ = env.step(tries(call))
    assert isinstance(observation, tuple)
    [message] = observation
    assert message.role == "tool"
    assert "no such tool" in message.content or "there is no tool 'judge'" in message.content
    assert (reward, terminated) == (0.0, False)


def test_a_call_id_of_the_policy_is_not_the_judges() -> None:
    env = begin()
    env.step(tries(python("judge")))
    env.step(ToolResults((ToolResult("judge", ToolStatus.OK, "1"),)))
    env.step(tries(ToolCall("judge_", "nothing")))
    observation, *_ = env.step(HANDS_IN)
    assert isinstance(observation, ToolCalls)
    assert observation.calls[0].id == "judge__"
    assert env.step(verdicts("judge__", "accepted", "accepted"))[1] == 1.0


def test_the_hidden_tests_are_in_no_message_and_no_state() -> None:
    env = CodeContestEnv()
    seen: list[Any] = [env.reset(seed=0, options={"task": TASK}), env.get_state()]
    seen += [env.step(tries(python("a"))), env.get_state()]
    seen += [env.step(ToolResults((ToolResult("a", ToolStatus.OK, "1"),))), env.get_state()]
    env.step(HANDS_IN)  # asks the judge, who may know
    seen += [env.get_state(), env.step(verdicts("judge", "accepted", "wrong_answer")), env.get_state()]
    assert SECRET not in repr(seen)


@pytest.mark.parametrize("status", [ToolStatus.ERROR, ToolStatus.INVALID, ToolStatus.TIMEOUT])
def test_without_a_verdict_there_is_no_reward(status: ToolStatus) -> None:
    env = begin()
    env.step(HANDS_IN)
    with pytest.raises(ToolFailure, match=f"no verdict \\({status.value}\\): why"):
        env.step(ToolResults((ToolResult("judge", status, "why"),)))


def test_results_come_when_they_are_due() -> None:
    env = begin()
    with pytest.raises(ValueError, match="were not called"):
        env.step(verdicts("judge", "accepted"))
    env.step(HANDS_IN)
    with pytest.raises(ValueError, match="the results of judge are due"):
        env.step(HANDS_IN)
    with pytest.raises(ValueError, match="results for other; expected judge"):
        env.step(verdicts("other", "accepted"))
    env = begin()
    env.step(tries(python("a")))
    with pytest.raises(ValueError, match="the results of a are due"):
        env.step(HANDS_IN)
    with pytest.raises(ValueError, match="results for b"):
        env.step(ToolResults((ToolResult("b", ToolStatus.OK, ""),)))


@pytest.mark.parametrize(
    "answer", [None, "6", {}, {"inputs": [], "outputs": []}, {"inputs": ["1"], "outputs": []}, {"inputs": [1], "outputs": [2]},
               {"inputs": ["1"], "outputs": ["1"], "compare": "eyes"}]
)  # fmt: skip
def test_tasks_without_tests_are_refused(answer: Any) -> None:
    with pytest.raises(TaskError, match="task 'bad'"):
        begin(Task("bad", TASK.prompt, answer=answer))


@pytest.mark.parametrize(
    ("options", "key"),
    [({"max_tries": -1}, "max_tries"), ({"scoring": "most"}, "scoring"), ({"prompt": "x"}, "prompt")],
)
def test_bad_options_are_named(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"env.options.{key}"):
        CodeContestEnv(**options)


def test_it_goes_on_from_any_state() -> None:
    actions = [
        tries(python("a"), ToolCall("x", "judge")),
        ToolResults((ToolResult("a", ToolStatus.OK, "1"),)),
        HANDS_IN,
        verdicts("judge", "accepted", "wrong_answer"),
    ]
    env, steps, states = begin(), [], []
    for action in actions:
        states.append(json.loads(json.dumps(env.get_state())))
        steps.append(env.step(action))
    assert steps[-1][1:3] == (0.5, True)
    for cut, state in enumerate(states):
        second_state = begin()
        second_state.set_state(state)
        assert second_state.get_state() == state
        assert [second_state.step(action) for action in actions[cut:]] == steps[cut:]
