"""The environment: how an episode goes, and what it is worth."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from agentrl import (
    Action,
    ConfigError,
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
)

from my_package.tools import look_up

PROMPT = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get "
    "new information. After reasoning, if you find you lack some knowledge, you can call a search engine by "
    "<search> query </search> and it will return the top searched results between <information> and </information>. "
    "You can search as many times as your want. If you find no further external knowledge needed, you can directly "
    "provide the answer inside <answer> and </answer>, without detailed illustrations. "
    "For example, <answer> Beijing </answer>. Question: {question}\n"
)
"""The words that the policy ``multihop-warm`` grew up with; any other model takes any other words."""

INFORMATION = '\n\n<information>Doc 1(Title: "{name}") {text}</information>\n\n'


class DirectoryEnv(Env):
    """The policy looks people up with ``<search> name </search>`` and ends with ``<answer> … </answer>``.

    The reward is 1 for the right answer, else 0.
    """

    stop: ClassVar[tuple[str, ...]] = ("</search>", "</answer>")
    tools: tuple[Tool, ...] = (look_up,)

    def __init__(self, *, max_lookups: int = 3) -> None:
        """Take the options of ``env.options``."""
        if max_lookups < 1:
            raise ConfigError(f"env.options.max_lookups is {max_lookups}; it must be at least 1")
        self.max_lookups = max_lookups
        self.names: list[str] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Start an episode: return the first messages."""
        super().reset(seed=seed, options=options)
        self.names = []
        return (Message("user", PROMPT.replace("{question}", self.task.question)),), self._info()

    def step(self, action: Action) -> Step:
        """Take the policy's message, or the result of the call that the last step returned.

        Return observation, reward, terminated, truncated, info.
        """
        if isinstance(action, ToolResults):
            return self._observation(action), 0.0, False, False, self._info()
        tag = re.search(r"<(search|answer)>([^<]*)</\1>", action.content)
        if tag is None:
            return (), 0.0, True, False, self._info()  # neither a lookup nor an answer: the end
        if tag[1] == "answer":
            right = float(tag[2].strip() == self.task.answer)
            return (), right, True, False, self._info(right)
        if len(self.names) == self.max_lookups:
            return (), 0.0, False, True, self._info()  # cut short
        self.names.append(tag[2].strip())
        call = ToolCall(f"lookup-{len(self.names)}", look_up.name, {"name": self.names[-1]})
        return ToolCalls((call,)), 0.0, False, False, self._info()

    def _observation(self, action: ToolResults) -> Observation:
        result = action.results[0]
        text = result.content if result.status is ToolStatus.OK else f"The lookup failed: {result.content}"
        # ``inline`` continues the policy's own turn, as this protocol wants it; other messages take the chat template.
        return (Message("user", INFORMATION.format(name=self.names[-1], text=text), inline=True),)

    def _info(self, right: float = 0.0) -> Info:
        """Return the metrics so far; they are averaged over episodes and logged."""
        return {"metrics": {"right": right, "lookups": float(len(self.names))}}

    @classmethod
    def example_task(cls) -> Task:
        """Return the task that ``agentrl env check`` plays."""
        return Task("example", (Message("user", "What is the employer of Tamo Rilek?"),), answer="Kelocorp")

    def get_state(self) -> dict[str, Any]:
        """Return the episode's state, JSON-able."""
        return {**super().get_state(), "names": list(self.names)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from what `get_state` returned."""
        super().set_state(state)
        self.names = list(state["names"])
