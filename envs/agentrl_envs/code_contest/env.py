"""Programming problems: the policy may try code, submits a program, and is scored by hidden tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, get_args

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
    Tool,
    ToolCall,
    ToolCalls,
    ToolFailure,
    ToolResult,
    ToolResults,
    ToolStatus,
    served_tools,
)
from agentrl.rewards.programs import is_encodable, program_in

from .hidden import hidden_tests

Scoring = Literal["share", "all"]
"""``share``: the fraction of hidden tests passed; ``all``: 1 if all are passed, else 0."""
ACCEPTED = "accepted"
FAULTS = ("wrong_answer", "runtime_error", "time_limit", "memory_limit", "output_limit")
"""The other verdicts; see the judge's ``Verdict``."""
PROMPT = (
    "Write a Python program that solves the problem below. It reads standard input and prints its answer to standard "
    "output. Hand it in as one block that begins with ```python and ends with ```.\n\n{problem}"
)
NO_TRIES = "There are no tries left; hand in your program."


class CodeContestEnv(Env):
    """The policy's first turn without a tool call ends the episode; the program in it is submitted to the judge.

    ``task.answer`` holds the hidden tests (see `HiddenTests`). Only the judge receives them; no message and no state
    contains them.
    """

    blocking: ClassVar[bool] = False
    tool_names: ClassVar[tuple[str, ...]] = ("python", "judge")
    handles_tool_calls: ClassVar[bool] = True

    def __init__(self, *, max_tries: int = 4, scoring: Scoring = "share", prompt: str = PROMPT) -> None:
        """Set tries, scoring and prompt.

        Args:
            max_tries: calls of the tool ``python``; with 0 the policy has no tool.
            scoring: see `Scoring`.
            prompt: the prompt around ``{problem}``.

        Raises:
            ConfigError: an option is out of range.
        """
        if max_tries < 0:
            raise ConfigError(f"env.options.max_tries is {max_tries}; it must be at least 0")
        if scoring not in get_args(Scoring):
            raise ConfigError(f"env.options.scoring is {scoring!r}; it is one of: {', '.join(get_args(Scoring))}")
        if "{problem}" not in prompt:
            raise ConfigError(f"env.options.prompt has no {{problem}} in it: {prompt[:80]!r}")
        self.max_tries = max_tries
        self.scoring = scoring
        self.prompt = prompt
        self.tools: Sequence[Tool] = served_tools("python") if max_tries else ()
        self._begin()

    def _begin(self) -> None:
        self._tries = 0
        self._used: list[str] = []
        self._trying: list[list[str]] = []
        self._judging = ""
        self._has_program = False
        self._verdicts: list[str] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Start an episode; the observation is the prompt around the problem.

        Raises:
            TaskError: the task has no problem, or no hidden tests.
        """
        super().reset(seed=seed, options=options)
        self._begin()
        if not self.task.question:
            raise TaskError(f"task {self.task.id!r} has no problem to solve")
        hidden_tests(self.task)
        text = self.prompt.replace("{problem}", self.task.question)
        return (*self.task.prompt[:-1], Message("user", text)), self._info()

    def step(self, action: Action) -> Step:
        """Process a turn of the policy, the results of the code it tried, or the judge's verdicts.

        Raises:
            ValueError: results of calls that were not made, or a turn while results are due.
            ToolFailure: the judge returned no verdicts.
        """
        if isinstance(action, ToolResults):
            return self._score_verdicts(action) if self._judging else self._answer_tries(action)
        if self._judging or self._trying:
            due = self._judging or ", ".join(call_id for call_id, _ in self._trying)
            raise ValueError(f"the results of {due} are due before the policy's next turn")
        self._used += [call.id for call in action.tool_calls]
        return self._try(action.tool_calls) if action.tool_calls else self._submit(action.content)

    def _try(self, calls: Sequence[ToolCall]) -> Step:
        """Run the allowed calls: only those of ``python``. A policy's call never reaches the judge."""
        self._trying, run = [], []
        for call in calls:
            fault = call.fault if call.status is not CallStatus.OK else ""
            if not fault and call.name not in {tool.name for tool in self.tools}:
                fault = f"there is no tool {call.name!r}"
            if not fault and self._tries >= self.max_tries:
                fault = NO_TRIES
            if not fault:
                self._tries += 1
                run.append(call)
            self._trying.append([call.id, fault])
        if run:
            return ToolCalls(tuple(run)), 0.0, False, False, self._info()
        return self._answer_tries(ToolResults(()))

    def _answer_tries(self, action: ToolResults) -> Step:
        ran = {result.call_id: result.content for result in action.results}
        if not self._trying or [*ran] != [call_id for call_id, fault in self._trying if not fault]:
            raise ValueError(f"results for {', '.join(ran) or 'nothing'}, which were not called")
        answers = tuple(Message("tool", fault or ran[call_id], tool_call_id=call_id) for call_id, fault in self._trying)
        self._trying = []
        return answers, 0.0, False, False, self._info()

    def _submit(self, content: str) -> Step:
        program = program_in(content)
        if program is None or not is_encodable(program):
            return (), 0.0, True, False, self._info()
        self._has_program = True
        self._judging = "judge"
        while self._judging in self._used:  # a policy may choose its call ids
            self._judging += "_"
        arguments = {"program": program, "stop_early": self.scoring == "all", **hidden_tests(self.task).arguments()}
        return ToolCalls((ToolCall(self._judging, "judge", arguments),)), 0.0, False, False, self._info()

    def _score_verdicts(self, action: ToolResults) -> Step:
        if [result.call_id for result in action.results] != [self._judging]:
            got = ", ".join(result.call_id for result in action.results)
            raise ValueError(f"results for {got or 'nothing'}; expected {self._judging}")
        self._verdicts = _verdicts(action.results[0])
        self._judging = ""
        reward = self._solved_score() if self.scoring == "all" else self._passed_share()
        return (), reward, True, False, self._info()

    def _passed_share(self) -> float:
        return self._share(ACCEPTED)

    def _solved_score(self) -> float:
        return float(bool(self._verdicts) and all(verdict == ACCEPTED for verdict in self._verdicts))

    def _share(self, verdict: str) -> float:
        return Counter(self._verdicts)[verdict] / len(self._verdicts) if self._verdicts else 0.0

    def _info(self) -> Info:
        """Return the metrics so far: they must be correct at every point, since the runner may truncate the episode."""
        return {
            "metrics": {
                "solved": self._solved_score(),
                "passed": self._passed_share(),
                **{fault: self._share(fault) for fault in FAULTS},
                "has_program": float(self._has_program),
                "tries": float(self._tries),
            }
        }

    @classmethod
    def example_task(cls) -> Task:
        """Return a problem with a solution of one line."""
        problem = "The input is one line of integers. Print their sum."
        tests = {"inputs": ["1 2 3\n", "-5 5\n"], "outputs": ["6\n", "0\n"]}
        return Task("example", (Message("user", problem),), answer=tests)

    def get_state(self) -> dict[str, Any]:
        """Return the episode's state, serializable as JSON and without the hidden tests."""
        return {
            **super().get_state(),
            "tries": self._tries,
            "used": list(self._used),
            "trying": [list(call) for call in self._trying],
            "judging": self._judging,
            "has_program": self._has_program,
            "verdicts": list(self._verdicts),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from what `get_state` returned, after a `reset` on the same task."""
        super().set_state(state)
        self._tries, self._used = state["tries"], list(state["used"])
        self._trying = [list(call) for call in state["trying"]]
        self._judging, self._has_program = state["judging"], state["has_program"]
        self._verdicts = list(state["verdicts"])


def _verdicts(result: ToolResult) -> list[str]:
    """Return the judge's verdicts. Missing ones are a failure of the judge, never of the policy."""
    if result.status is not ToolStatus.OK:
        raise ToolFailure(f"the judge returned no verdict ({result.status.value}): {result.content}")
    return list(result.data["verdicts"])
