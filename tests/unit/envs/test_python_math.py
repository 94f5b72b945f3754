"""Mathematics with a Python tool: what is run, what is answered, and what scores."""

import pytest
from agentrl_envs.python_math import PythonMathEnv, same_answer
from agentrl_envs.python_math.env import NO_CALLS_LEFT, NOT_RUN

from agentrl import Message, Task, ToolCall, ToolCalls, ToolResult, ToolResults, ToolStatus
from agentrl.core.env import Step
from agentrl.core.errors import ConfigError, TaskError
from agentrl.core.registry import make_env
from agentrl.core.types import CallStatus
from agentrl.testing import check_env

TASK = Task("t", (Message("user", "What is 2 times 21?"),), answer="42")


def started(task: Task = TASK, **options: object) -> PythonMathEnv:
    env = PythonMathEnv(**options)  # type: ignore[arg-type]
    env.reset(seed=0, options={"task": task})
    return env


def call(name: str, **more: object) -> ToolCall:
    return ToolCall(name, "python", {"code": "print(2 * 21)"}, **more)  # type: ignore[arg-type]


def say(env: PythonMathEnv, text: str, *calls: ToolCall) -> Step:
    return env.step(Message("assistant", text, tool_calls=calls))


def ran(env: PythonMathEnv, *results: ToolResult) -> Step:
    return env.step(ToolResults(results))


def test_call_then_answer() -> None:
    env = started()
    (prompt,), _ = env.reset(seed=0, options={"task": TASK})
    assert prompt.content.endswith("\n\nWhat is 2 times 21?")
    assert [tool.name for tool in env.tools] == ["python"]
    assert env.tools[0].server == "python"
    action, reward, terminated, truncated, _ = say(env, "<tool_call>…</tool_call>", call("a"))
    assert action == ToolCalls((call("a"),))
    assert (reward, terminated, truncated) == (0.0, False, False)
    observation, *_ = ran(env, ToolResult("a", ToolStatus.OK, "42"))
    assert observation == (Message("tool", "42", tool_call_id="a"),)
    observation, reward, terminated, truncated, info = say(env, "So it is \\boxed{42}.")
    assert (observation, reward, terminated, truncated) == ((), 1.0, True, False)
    assert info["metrics"] == {
        "tool_calls": 1.0,
        "tool_errors": 0.0,
        "tool_timeouts": 0.0,
        "answered": 1.0,
        "correct": 1.0,
    }


@pytest.mark.parametrize(
    ("content", "answered", "correct"),
    [
        ("42", 0, 0),
        ("\\boxed{41}", 1, 0),
        ("\\boxed{41} no, \\boxed{42}", 1, 1),
        ("\\boxed{42} no, \\boxed{41}", 1, 0),
        ("<think>\\boxed{42}</think> It is 42.", 0, 0),
        ("<think>\\boxed{41}</think> \\boxed{42}", 1, 1),
        ("\\boxed{}", 0, 0),
        ("\\boxed{42", 0, 0),
        ("", 0, 0),
    ],
)
def test_only_the_last_box_of_the_final_turn_counts(content: str, answered: int, correct: int) -> None:
    _, reward, terminated, _, info = say(started(), content)
    assert terminated
    assert (reward, info["metrics"]["answered"], info["metrics"]["correct"]) == (correct, answered, correct)


def test_a_box_beside_a_call_or_from_a_tool_scores_nothing() -> None:
    env = started()
    say(env, "\\boxed{42}", call("a"))
    ran(env, ToolResult("a", ToolStatus.OK, "\\boxed{42}"))
    _, reward, terminated, _, info = say(env, "As I said.")
    assert (reward, terminated, info["metrics"]["answered"]) == (0.0, True, 0.0)


@pytest.mark.parametrize(
    ("answer", "right", "same"),
    [
        ("1,234", "1234", True),
        ("1234.0", "1,234", True),
        ("$1234$", "1234", True),
        ("-7", "−7", True),
        ("1234", "1235", False),
        (f"{10**400 + 1}", f"{10**400}", False),
        (f"{10**400:,}", f"{10**400}", True),
        ("20\\%", "20", True),
        ("20", "$20\\%$", True),
        ("20\\%", "0.2", False),
        ("Tuesday", "Tuesday", True),
        ("  x + 1 ", "x +  1", True),
        ("\\frac{1}{2}", "0.5", True),
        ("\\frac{\\sqrt{8}}{2}", "\\sqrt{2}", True),
        ("\\frac{\\sqrt{8}}{3}", "\\sqrt{2}", False),
        ("(1, 2)", "(2, 1)", False),
        ("\\frac{3}{4}", "\\boxed{\\frac{6}{8}}", True),
        ("Monday", "Tuesday", False),
    ],
)
def test_answers_that_mean_the_same(answer: str, right: str, same: bool) -> None:
    assert same_answer(answer, [right]) is same


def test_any_accepted_answer_is_right() -> None:
    env = started(Task("t", (Message("user", "?"),), answer=["north", "42"]))
    assert say(env, "\\boxed{42}")[1] == 1.0


def test_calls_that_cannot_be_read_are_answered_and_not_run() -> None:
    env = started()
    broken = ToolCall("b", "", status=CallStatus.INVALID_JSON, fault="no JSON")
    observation, *_, info = say(env, "", broken)
    assert observation == (Message("tool", "no JSON", tool_call_id="b"),)
    assert info["metrics"] | {"answered": 0.0} == info["metrics"]
    assert (info["metrics"]["tool_calls"], info["metrics"]["tool_errors"]) == (1.0, 1.0)
    action, *_ = say(env, "", call("c"), ToolCall("d", "x", status=CallStatus.UNKNOWN_TOOL, fault="no tool x"))
    assert action == ToolCalls((call("c"),))
    observation, *_ = ran(env, ToolResult("c", ToolStatus.OK, "42"))
    assert isinstance(observation, tuple)
    assert [(message.content, message.tool_call_id) for message in observation] == [("42", "c"), ("no tool x", "d")]


def test_errors_and_timeouts_are_counted_and_can_cost() -> None:
    env = started(tool_error_penalty=0.125)
    say(env, "", call("a"), call("b"))
    *_, info = ran(env, ToolResult("a", ToolStatus.ERROR, "NameError"), ToolResult("b", ToolStatus.TIMEOUT, "late"))
    assert (info["metrics"]["tool_errors"], info["metrics"]["tool_timeouts"]) == (2.0, 1.0)
    assert say(env, "\\boxed{42}")[1] == 0.75


def test_after_the_last_call_it_must_answer() -> None:
    env = started(max_tool_calls=2)
    say(env, "", call("a"))
    ran(env, ToolResult("a", ToolStatus.OK, "1"))
    action, *_ = say(env, "", call("b"), call("c"))
    assert action == ToolCalls((call("b"),))
    observation, *_, info = ran(env, ToolResult("b", ToolStatus.OK, "2"))
    assert isinstance(observation, tuple)
    assert [message.content for message in observation] == ["2", f"{NOT_RUN}\n{NO_CALLS_LEFT}"]
    assert (info["metrics"]["tool_calls"], info["metrics"]["tool_errors"]) == (2.0, 0.0)
    assert say(env, "\\boxed{42}")[1:4] == (1.0, True, False)


def test_a_call_past_the_last_ends_the_episode() -> None:
    env = started(max_tool_calls=1)
    say(env, "", call("a"))
    observation, *_ = ran(env, ToolResult("a", ToolStatus.OK, "1"))
    assert observation == (Message("tool", f"1\n{NO_CALLS_LEFT}", tool_call_id="a"),)
    assert say(env, "\\boxed{42}", call("b"))[:4] == ((), 0.0, False, True)


def test_format_reward() -> None:
    assert say(started(format_reward=0.1), "\\boxed{41}")[1] == 0.1
    assert say(started(format_reward=0.1), "\\boxed{42}")[1] == 1.0
    assert say(started(format_reward=0.1), "41")[1] == 0.0


def test_out_of_turn() -> None:
    env = started()
    with pytest.raises(ValueError, match="expected none"):
        ran(env, ToolResult("a", ToolStatus.OK, "1"))
    say(env, "", call("a"))
    with pytest.raises(ValueError, match=r"'a'.* are due"):
        say(env, "\\boxed{42}")
    with pytest.raises(ValueError, match="expected \\['a'\\]"):
        ran(env, ToolResult("b", ToolStatus.OK, "1"))


@pytest.mark.parametrize("answer", [None, "", [], 42, [""]])
def test_a_task_needs_an_answer(answer: object) -> None:
    with pytest.raises(TaskError, match="needs a question and an answer"):
        started(Task("t", TASK.prompt, answer=answer))


def test_an_answer_that_nobody_can_read() -> None:
    with pytest.raises(TaskError, match="'t'"):
        say(started(Task("t", TASK.prompt, answer="\\text{ }")), "\\boxed{42}")


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"format_reward": 1.0}, "format_reward"),
        ({"tool_error_penalty": -1.0}, "tool_error_penalty"),
        ({"prompt": "Solve."}, "prompt"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=f"env.options.{key}"):
        make_env("python_math", options)


def test_state_goes_on_in_the_middle_of_a_call() -> None:
    env = started()
    say(env, "", call("a"), ToolCall("d", "x", status=CallStatus.UNKNOWN_TOOL, fault="no tool x"))
    second_env = started()
    second_env.set_state(env.get_state())
    results = ToolResult("a", ToolStatus.OK, "42")
    assert ran(env, results) == ran(second_env, results)
    check_env(PythonMathEnv)
