r"""Solve a problem with a Python tool, and give the answer in ``\boxed{}``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from agentrl import (
    Action,
    CallStatus,
    ConfigError,
    Env,
    Info,
    Message,
    Observation,
    Step,
    Task,
    TaskError,
    ToolCall,
    ToolCalls,
    ToolResult,
    ToolResults,
    ToolStatus,
    served_tools,
)
from agentrl.rewards import answer_text, last_boxed

from .scoring import same_answer

PROMPT = (
    "Solve the problem. You can run Python code with the tool `python`: it returns what the code prints. "
    "Give the final answer in \\boxed{}.\n\n{question}"
)
NO_CALLS_LEFT = "[no calls are left: give the final answer in \\boxed{} now]"
"""Appended to the result of the last call that is run."""
NOT_RUN = "not run: there are no calls left"
"""Result of a call beyond the limit, in the same turn."""

_COUNTS = ("tool_calls", "tool_errors", "tool_timeouts", "answered", "correct")


class PythonMathEnv(Env):
    r"""A problem, calls of ``python``, and an answer in ``\boxed{}``. ``task.answer`` is the right answer, or a list of them.

    The policy's first turn without a call is its answer and ends the episode. Only its last box counts, and it is right if
    it is equivalent to an accepted answer; tool results and earlier turns score nothing.
    """

    tool_names: ClassVar[tuple[str, ...]] = ("python",)
    handles_tool_calls: ClassVar[bool] = True

    def __init__(
        self,
        *,
        max_tool_calls: int = 8,
        format_reward: float = 0.0,
        tool_error_penalty: float = 0.0,
        prompt: str = PROMPT,
    ) -> None:
        r"""Set limits, rewards and prompt.

        Args:
            max_tool_calls: calls per episode, unparsable ones included; after them the policy must answer, and
                another call ends the episode.
            format_reward: reward of a wrong answer in a box.
            tool_error_penalty: subtracted from the reward for each call that failed.
            prompt: the prompt around ``{question}``.

        Raises:
            ConfigError: a number is out of range, or the prompt is without ``{question}``.
        """
        if max_tool_calls < 1:
            raise ConfigError(f"env.options.max_tool_calls is {max_tool_calls}; it must be at least 1")
        if not 0 <= format_reward < 1:
            raise ConfigError(
                f"env.options.format_reward is {format_reward}; a right answer has 1, it must be in [0, 1)"
            )
        if tool_error_penalty < 0:
            raise ConfigError(f"env.options.tool_error_penalty is {tool_error_penalty}; it must be at least 0")
        if "{question}" not in prompt:
            raise ConfigError(f"env.options.prompt has no {{question}} in it: {prompt[:80]!r}")
        self.max_tool_calls = max_tool_calls
        self.format_reward = format_reward
        self.tool_error_penalty = tool_error_penalty
        self.prompt = prompt
        self.tools = served_tools("python")
        self._begin()

    def _begin(self) -> None:
        self._count = dict.fromkeys(_COUNTS, 0)
        self._calls: list[tuple[str, str]] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Start an episode: the task's messages, the prompt around its question.

        Raises:
            TaskError: the task has no question, or no answer to compare with.
        """
        super().reset(seed=seed, options=options)
        self._begin()
        accepted = self._accepted_answers()
        if not self.task.question or not accepted or not all(isinstance(text, str) and text for text in accepted):
            raise TaskError(
                f"task {self.task.id!r} needs a question and an answer (a text or a list of texts); "
                f"it has {self.task.question!r} and {self.task.answer!r}"
            )
        text = self.prompt.replace("{question}", self.task.question)
        return (*self.task.prompt[:-1], Message("user", text)), self._info()

    def step(self, action: Action) -> Step:
        """Process a turn of the policy, or the results of its calls.

        Raises:
            ValueError: results of calls that were not made, or a turn while results are due.
            TaskError: the task's answer cannot be compared.
        """
        if isinstance(action, ToolResults):
            return self._continue(self._receive_results(action))
        if self._calls:
            raise ValueError(f"the results of calls {self._due()} are due before the policy's next turn")
        if not action.tool_calls:
            return self._score_answer(action.content)
        if self._count["tool_calls"] >= self.max_tool_calls:
            return (), self._reward(0.0), False, True, self._info()
        return self._continue(self._start_calls(action.tool_calls))

    def _continue(self, observation: Observation) -> Step:
        return observation, 0.0, False, False, self._info()

    def _start_calls(self, calls: Sequence[ToolCall]) -> Observation:
        """Return the calls that can be run; if there are none, messages with their errors."""
        calls_left = self.max_tool_calls - self._count["tool_calls"]
        runnable = [call for call in calls[:calls_left] if call.status is CallStatus.OK]
        faults = [_call_fault(call) for call in calls[:calls_left]] + [NOT_RUN] * (len(calls) - calls_left)
        self._calls = [(call.id, fault) for call, fault in zip(calls, faults, strict=True)]
        self._count["tool_calls"] += min(calls_left, len(calls))
        return ToolCalls(tuple(runnable)) if runnable else self._results({})

    def _receive_results(self, action: ToolResults) -> tuple[Message, ...]:
        got = [result.call_id for result in action.results]
        if got != self._due() or not got:
            raise ValueError(f"results for {got or 'nothing'}; expected {self._due() or 'none'}")
        return self._results({result.call_id: result for result in action.results})

    def _due(self) -> list[str]:
        return [name for name, fault in self._calls if not fault]

    def _results(self, results: dict[str, ToolResult]) -> tuple[Message, ...]:
        """Return one message per call; the last one of an episode says that no calls are left."""
        messages = []
        for name, fault in self._calls:
            result = results.get(name) or ToolResult(name, ToolStatus.INVALID, fault)
            self._count["tool_errors"] += result.status is not ToolStatus.OK and fault != NOT_RUN
            self._count["tool_timeouts"] += result.status is ToolStatus.TIMEOUT
            messages.append(Message("tool", result.content, tool_call_id=name))
        self._calls = []
        if self._count["tool_calls"] >= self.max_tool_calls:
            last = messages.pop()
            messages.append(Message("tool", f"{last.content}\n{NO_CALLS_LEFT}", tool_call_id=last.tool_call_id))
        return tuple(messages)

    def _score_answer(self, content: str) -> Step:
        boxed = last_boxed(answer_text(content))
        right = False
        if boxed:
            try:
                right = same_answer(boxed, self._accepted_answers())
            except ValueError as error:
                raise TaskError(f"task {self.task.id!r}: {error}") from None
        self._count["answered"], self._count["correct"] = int(bool(boxed)), int(right)
        reward = 1.0 if right else self.format_reward if boxed else 0.0
        return (), self._reward(reward), True, False, self._info()

    def _reward(self, earned: float) -> float:
        return earned - self.tool_error_penalty * self._count["tool_errors"]

    def _accepted_answers(self) -> Sequence[Any]:
        answer = self.task.answer
        return answer if isinstance(answer, list | tuple) else [answer] if answer is not None else []

    def _info(self) -> Info:
        """Return the metrics so far: they must be correct at every point, since the runner may truncate the episode."""
        return {"metrics": {name: float(count) for name, count in self._count.items()}}

    @classmethod
    def example_task(cls) -> Task:
        """Return a product, which is easier with the tool."""
        return Task("example", (Message("user", "What is 12345 times 6789?"),), answer="83810205")

    def get_state(self) -> dict[str, Any]:
        """Return the episode's state, serializable as JSON."""
        return {**super().get_state(), "count": dict(self._count), "calls": [list(call) for call in self._calls]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from what `get_state` returned, after a `reset` on the same task."""
        super().set_state(state)
        self._count = dict(state["count"])
        self._calls = [(name, fault) for name, fault in state["calls"]]


def _call_fault(call: ToolCall) -> str:
    return "" if call.status is CallStatus.OK else call.fault or call.status.value
