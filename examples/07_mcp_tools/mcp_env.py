"""An environment whose policy calls the tools of an MCP server."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from agentrl_envs.search_r1.protocol import PROMPT

from agentrl import (
    Action,
    Env,
    Info,
    Message,
    Observation,
    Step,
    Task,
    ToolCall,
    ToolCalls,
    ToolResults,
    ToolStatus,
    register_tool,
    served_tools,
)
from agentrl.toolserver.mcp.client import McpService

FACTS = ("birthplace", "employer", "spouse")


@register_tool("registry")
class RegistryServer(McpService):
    """The MCP server. A run starts its command once for each episode."""

    name = "registry"
    command = (sys.executable, str(Path(__file__).with_name("server.py")))


class McpEnv(Env):
    """``<think> fact </think><search> name </search>`` queries the registry, ``<answer> … </answer>`` ends the episode.

    A policy that writes tool calls itself needs no text protocol: the runner runs its calls of `tools`.
    """

    stop: ClassVar[tuple[str, ...]] = ("</search>", "</answer>")
    tool_names: ClassVar[tuple[str, ...]] = ("registry",)

    def __init__(self) -> None:
        self.tools = served_tools("registry")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        super().reset(seed=seed, options=options)
        self.name = ""
        self.calls = self.refused = 0
        return self.task.prompt, self._info()

    def step(self, action: Action) -> Step:
        if isinstance(action, ToolResults):
            return self._receive_results(action)
        answer = re.search(r"<answer> ([^<]*) </answer>", action.content)
        if answer is not None:
            right = float(answer[1] == self.task.answer)
            return (), right * (1 - 0.2 * self.refused), True, False, self._info(right)
        query = re.search(r"<think> ([^<]*) </think><search> ([^<]*) </search>", action.content)
        if query is None:
            return (), 0.0, True, False, self._info()
        self.calls += 1
        self.name = query[2]
        call = ToolCall(f"call-{self.calls}", "ask_registry", {"name": query[2], "fact": query[1]})
        return ToolCalls((call,)), 0.0, False, False, self._info()

    def _receive_results(self, action: ToolResults) -> Step:
        result = action.results[0]
        self.refused += result.status is ToolStatus.INVALID
        text = f'Doc 1(Title: "{self.name}") {result.content}' if result.status is ToolStatus.OK else result.content
        message = Message("user", f"\n\n<information>{text}</information>\n\n", inline=True)
        return (message,), 0.0, False, False, self._info()

    def _info(self, right: float = 0.0) -> Info:
        return {"metrics": {"right": right, "calls": float(self.calls), "refused": float(self.refused)}}

    @classmethod
    def tasks(cls, split: str, seed: int) -> Sequence[Task]:
        rng = Random(f"{split}/{seed if split == 'train' else 0}")
        return [_task(rng, f"registry/{split}/{i}", fact) for i in range(170) for fact in FACTS]

    @classmethod
    def example_task(cls) -> Task:
        return _task(Random(0), "example", "employer")

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "name": self.name, "calls": self.calls, "refused": self.refused}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.name, self.calls, self.refused = state["name"], state["calls"], state["refused"]


def _task(rng: Random, name: str, fact: str) -> Task:
    """Half of the questions are about the spouse of a person, and need two calls."""
    from server import person, word  # the folder of the environment's file can be imported from

    person_name = f"{word(rng)} {word(rng)}"
    if rng.random() < 0.5:
        subject, answer = f"the {fact} of {person_name}", person(person_name)[fact]
    else:
        subject, answer = f"the {fact} of the spouse of {person_name}", person(person(person_name)["spouse"])[fact]
    return Task(f"{name}/{fact}", (Message("user", PROMPT.replace("{question}", f"What is {subject}?")),), answer)
