"""Container tasks in Harbor's format: commands in the task's machine, then the task's tests."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, get_args

from agentrl import (
    Action,
    CallStatus,
    ConfigError,
    Env,
    Image,
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

from .protocol import NEXT_STEP, STOP, TEXT_PROMPT, TOOLS_PROMPT, output_text, parse_command

Protocol = Literal["tools", "text", "program"]
"""``tools``: calls of the tool `bash`; ``text``: commands between ``<bash>`` and ``</bash>``; ``program``: none, since an agent
program works in the machine (``rollout.agent.sandbox=container``)."""
PROMPTS = {"tools": TOOLS_PROMPT, "text": TEXT_PROMPT, "program": "{instruction}"}
NO_CALLS_LEFT = "no commands are left: say that you are done"
"""Answer to a command beyond the limit."""
TERMINAL, BASH = "terminal", "bash"
"""Tools of the service ``terminal``: the first for the environment, the second for policies."""
TASK_FOLDER = "task_folder"
"""Key of a task's metadata with the path of its folder."""
_COUNTS = ("commands", "failed_commands", "timeouts", "cut_outputs")


@dataclass(slots=True)
class _QueuedCall:
    """A call of the policy's turn; its fields are JSON-able."""

    id: str
    """The policy's."""
    tool: str
    """At the tool server."""
    arguments: str
    """Arguments of that tool, as JSON."""
    answer: str = ""
    """Empty: not run yet."""
    images: list[str] = field(default_factory=list)
    """Images of the answer, as ``data:`` URLs."""


class TerminalEnv(Env):
    """The policy runs commands one after the other; a turn without a command ends the step, and the task's tests grade it.

    ``task.metadata["task_folder"]`` is the path of a task in Harbor's format, as the tool server sees it. Machine and tests are
    the tool server's; no message and no state has anything of the tests.
    """

    tool_names: ClassVar[tuple[str, ...]] = ("terminal",)
    handles_tool_calls: ClassVar[bool] = True
    opens_machine: ClassVar[bool] = True

    def __init__(self, *, protocol: Protocol = "tools", max_commands: int = 50, prompt: str | None = None) -> None:
        """Set protocol, limit and prompt.

        Args:
            protocol: see `Protocol`.
            max_commands: commands of an episode; after them the policy is notified once, and then graded whatever it answers.
            prompt: the prompt around ``{instruction}``; None: that of the protocol.

        Raises:
            ConfigError: an option is out of range.
        """
        if protocol not in get_args(Protocol):
            raise ConfigError(f"env.options.protocol is {protocol!r}; it is one of: {', '.join(get_args(Protocol))}")
        if max_commands < 1:
            raise ConfigError(f"env.options.max_commands is {max_commands}; it must be at least 1")
        if prompt is not None and "{instruction}" not in prompt:
            raise ConfigError(f"env.options.prompt has no {{instruction}} in it: {prompt[:80]!r}")
        self.protocol = protocol
        self.max_commands = max_commands
        self.prompt = prompt or PROMPTS[protocol]
        self._bash: Sequence[Tool] = served_tools("terminal") if protocol == "tools" else ()
        self.tools = self._bash
        self.stop: tuple[str, ...] = STOP if protocol == "text" else ()  # type: ignore[misc]
        self._begin("")

    def _begin(self, machine: str) -> None:
        self._machine = machine
        self._offer_mcp_tools(())
        self._access: Mapping[str, Any] | None = None
        """Access of the agent program, as the tool server has given it."""
        self._calls = 0
        """Calls of `BASH` that reached the machine."""
        self._due = ""
        self._queue: list[_QueuedCall] = []
        """Calls of the turn, in order."""
        self._is_told = False
        self._is_open = self._is_cut = False
        self._step = 0
        self._step_rewards: list[dict[str, float]] = []
        self._count = dict.fromkeys(_COUNTS, 0)
        self._metrics: dict[str, float] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Start an episode: request a new machine; the prompt follows its result.

        Raises:
            TaskError: the task names no folder.
        """
        super().reset(seed=seed, options=options)
        folder = self.task.metadata.get(TASK_FOLDER)
        if not isinstance(folder, str) or not folder:
            raise TaskError(
                f"task {self.task.id!r}: metadata[{TASK_FOLDER!r}] is {folder!r}, and no path of a task's folder"
            )
        # Not of the seed: another attempt at the same episode must not be taken for this one.
        self._begin(uuid.uuid4().hex[:12])
        # An agent program connects to the task's MCP servers itself.
        connect = {"connect": False} if self.protocol == "program" else {}
        return self._call("open", TERMINAL, {"action": "open", "folder": folder, **connect}), self._info()

    def _call(self, name: str, tool: str, arguments: Mapping[str, Any]) -> ToolCalls:
        self._due = f"{self._machine}-{name}"
        return ToolCalls((ToolCall(self._due, tool, arguments),))

    def step(self, action: Action) -> Step:
        """Process a turn of the policy, or the result of a call.

        Raises:
            ValueError: results of a call that was not made, or a turn while a result is due.
            ToolFailure: the tests gave no reward.
        """
        if isinstance(action, ToolResults):
            return self._receive(action)
        if self._due:
            raise ValueError(f"the result of {self._due} is due before the policy's next turn")
        commands = self._commands(action)
        if not commands or self._is_told:
            return self._grade()
        self._queue = commands
        return self._run_next()

    def _commands(self, message: Message) -> list[_QueuedCall]:
        if self.protocol == "program":
            return []
        if self.protocol == "text":
            command = parse_command(message.content)
            return [] if command is None else [_QueuedCall("", BASH, json.dumps({"command": command}))]
        return [_QueuedCall(call.id, *self._hosted_call(call), self._fault(call)) for call in message.tool_calls]

    def _hosted_call(self, call: ToolCall) -> tuple[str, str]:
        """Return tool and arguments at the tool server of a call of the policy."""
        mcp_tool = self._mcp_tools.get(call.name)
        if mcp_tool is None:
            return BASH, json.dumps({"command": str(call.arguments.get("command", ""))})
        arguments = {"action": "call", "server": mcp_tool["server"], "tool": mcp_tool["tool"]}
        return TERMINAL, json.dumps({**arguments, "arguments": dict(call.arguments)})

    def _fault(self, call: ToolCall) -> str:
        if call.status is not CallStatus.OK:
            return call.fault or call.status.value
        return "" if call.name == BASH or call.name in self._mcp_tools else f"there is no tool {call.name!r}"

    def _run_next(self) -> Step:
        """Run the next command of the turn, or return the answers of all."""
        for call in self._queue:
            if call.answer:
                continue
            if self._calls >= self.max_commands:
                call.answer = NO_CALLS_LEFT
                self._is_told = True
                continue
            self._calls += 1
            self._count["commands"] += 1
            return self._continue(self._call(str(self._calls), call.tool, json.loads(call.arguments)))
        answers = tuple(map(self._answer, self._queue))
        self._queue = []
        return self._continue(answers)

    def _answer(self, call: _QueuedCall) -> Message:
        if self.protocol == "text":
            return Message("user", output_text(call.answer))
        images = tuple(map(Image.from_data_url, call.images))
        return Message("tool", call.answer, tool_call_id=call.id, images=images)

    def _continue(self, observation: Observation) -> Step:
        return observation, 0.0, False, False, self._info()

    def _receive(self, action: ToolResults) -> Step:
        if not self._due or [result.call_id for result in action.results] != [self._due]:
            got = ", ".join(result.call_id for result in action.results)
            raise ValueError(f"results for {got or 'nothing'}; expected {self._due or 'none'}")
        result, name = action.results[0], self._due.removeprefix(f"{self._machine}-")
        self._due = ""
        if name == "open":
            self._is_open = True
            self._access = _data(result)["machine"]
            self._offer_mcp_tools(_data(result)["tools"])
            text = self.prompt.replace("{instruction}", _data(result)["instruction"])
            return self._continue((Message("user", text),))
        if name.startswith("grade"):
            return self._score(_data(result))
        call = next(call for call in self._queue if not call.answer)
        call.answer = result.content or "[no output]"
        call.images = [image.data_url for image in result.images]
        self._count["failed_commands"] += result.status is ToolStatus.ERROR
        self._count["timeouts"] += result.status is ToolStatus.TIMEOUT
        self._count["cut_outputs"] += bool((result.data or {}).get("is_cut"))
        return self._run_next()

    def _offer_mcp_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Offer tools of the task's MCP servers, as the tool server describes them, next to `BASH`.

        Raises:
            TaskError: the protocol has no calls of other tools.
        """
        if tools and self.protocol != "tools":
            raise TaskError(
                f"task {self.task.id!r} has MCP servers, whose tools need env.options.protocol=tools, not {self.protocol}"
            )
        self._mcp_tools = {str(tool["name"]): dict(tool) for tool in tools}
        offered = (Tool(tool["name"], tool["description"], tool["parameters"], server=TERMINAL) for tool in tools)
        self.tools = (*self._bash, *offered)

    def _grade(self) -> Step:
        arguments = {"action": "grade", "step": self._step, "rewards": self._step_rewards}
        # At a limit, a command may have been on its way.
        calls = {} if self._is_cut else {"calls": self._calls}
        return self._continue(self._call(f"grade-{self._step}", TERMINAL, {**arguments, **calls}))

    def truncate(self) -> tuple[float, Info] | ToolCalls:
        """Grade the step as it is when a limit of the run ends the episode."""
        if not self._is_open:
            return 0.0, self._info()
        self._is_cut = True
        observation, *_ = self._grade()
        assert isinstance(observation, ToolCalls)
        return observation

    def _score(self, grade: Mapping[str, Any]) -> Step:
        """Take the grade of a step; continue with the next step, if there is one."""
        self._step_rewards.append(dict(grade["rewards"]))
        self._metrics = {
            "forgeable": max(self._metrics.get("forgeable", 0.0), float(grade["forgeable"])),
            "tests_at_limit": self._metrics.get("tests_at_limit", 0.0) + grade["at_limit"],
            "refused_files": self._metrics.get("refused_files", 0.0) + len(grade["refused"]),
            "steps": float(self._step + 1),
            **{f"reward_{name}": reward for name, reward in grade["task_rewards"].items()},
        }
        if grade["instruction"] is None or self._is_cut:
            return (), grade["reward"], True, False, self._info()
        self._step += 1
        self._is_told = False
        self._access = grade["machine"]
        # A program begins its own conversation for each step.
        text = self.prompt if self.protocol == "program" else NEXT_STEP
        return self._continue((Message("user", text.replace("{instruction}", grade["instruction"])),))

    def _info(self) -> Info:
        """Return the metrics so far: they must be correct at every point, since the runner may truncate the episode."""
        counts = {} if self.protocol == "program" else {name: float(count) for name, count in self._count.items()}
        return {"metrics": {**counts, **self._metrics}, "machine": self._access}

    @classmethod
    def example_task(cls) -> Task:
        """Return a task; its folder need not be there until a tool server opens its machine."""
        return Task("example", (Message("user", "Create hello.txt."),), metadata={TASK_FOLDER: "tasks/hello"})

    def get_state(self) -> dict[str, Any]:
        """Return the episode's state, serializable as JSON; files and processes are the machine's."""
        return {
            **super().get_state(),
            "machine": self._machine,
            "calls": self._calls,
            "due": self._due,
            "queue": [asdict(call) for call in self._queue],
            "mcp_tools": list(self._mcp_tools.values()),
            "is_told": self._is_told,
            "is_open": self._is_open,
            "step": self._step,
            "step_rewards": [dict(rewards) for rewards in self._step_rewards],
            "count": dict(self._count),
            "metrics": dict(self._metrics),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from what `get_state` returned, after a `reset` on the same task: with the machine of that time."""
        super().set_state(state)
        self._machine, self._calls, self._due = state["machine"], state["calls"], state["due"]
        self._queue = [_QueuedCall(**call) for call in state["queue"]]
        self._offer_mcp_tools(state["mcp_tools"])
        self._is_told, self._is_open, self._step = state["is_told"], state["is_open"], state["step"]
        self._step_rewards = [dict(rewards) for rewards in state["step_rewards"]]
        self._count, self._metrics = dict(state["count"]), dict(state["metrics"])


def _data(result: ToolResult) -> Mapping[str, Any]:
    """Return a result's data. Missing ones are a failure of the machine or of the tests, never of the policy."""
    if result.status is not ToolStatus.OK:
        raise ToolFailure(f"{result.call_id}: {result.status.value}: {result.content}")
    data: Mapping[str, Any] = result.data
    return data
