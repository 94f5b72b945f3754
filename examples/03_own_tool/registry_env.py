"""A tool with typed arguments, and the environment that calls it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import Any, ClassVar, Literal

from agentrl_envs.search_r1.protocol import PROMPT

from agentrl import (
    Action,
    Env,
    Info,
    Message,
    Observation,
    Step,
    Task,
    Tool,
    ToolCall,
    ToolCalls,
    ToolResults,
    ToolStatus,
    register_env,
    tool,
)

PHRASES = {"birthplace": "was born in", "employer": "works for", "spouse": "is married to"}


def _word(rng: Random) -> str:
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeo") for _ in range(2)).capitalize()


def _person(name: str) -> dict[str, str]:
    """Facts about a person. Equal names give equal facts, so that nothing has to be stored."""
    rng = Random(name)
    return {
        "birthplace": _word(rng) + rng.choice(("burg", "ton", "ville", "ford")),
        "employer": _word(rng) + rng.choice(("corp", "works", "tex")),
        "spouse": f"{_word(rng)} {_word(rng)}",
    }


@tool(timeout_s=5)
async def ask_registry(name: str, fact: Literal["birthplace", "employer", "spouse"]) -> str:
    """Return one fact about a person."""
    return f"{name} {PHRASES[fact]} {_person(name)[fact]}."


@register_env("registry")
class Registry(Env):
    """``<think> fact </think><search> name </search>`` queries the registry, ``<answer> … </answer>`` ends the episode.

    The registry returns one fact per call. The reward is 1 for the right answer, minus 0.2 for every call with invalid
    arguments.
    """

    stop: ClassVar[tuple[str, ...]] = ("</search>", "</answer>")
    tools: tuple[Tool, ...] = (ask_registry,)

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
        call = ToolCall(f"call-{self.calls}", ask_registry.name, {"name": query[2], "fact": query[1]})
        return ToolCalls((call,)), 0.0, False, False, self._info()

    def _receive_results(self, action: ToolResults) -> Step:
        """The runner has checked the arguments against the tool's schema: an unknown fact has status ``INVALID``."""
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
        return [_task(rng, f"registry/{split}/{i}", fact) for i in range(170) for fact in PHRASES]

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
    person = f"{_word(rng)} {_word(rng)}"
    if rng.random() < 0.5:
        subject, answer = f"the {fact} of {person}", _person(person)[fact]
    else:
        subject, answer = f"the {fact} of the spouse of {person}", _person(_person(person)["spouse"])[fact]
    return Task(f"{name}/{fact}", (Message("user", PROMPT.replace("{question}", f"What is {subject}?")),), answer)
