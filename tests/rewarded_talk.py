"""A multi-agent environment that follows a script: who acts, what is read, and which rewards it gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl import Message, MultiAgentEnv
from agentrl.core.multi_agent_env import MultiReset, MultiStep, View
from agentrl.core.types import Rewrite

Step = tuple[str, str, float, float]
"""Who acts (``a``, ``b`` or ``ab``), what all read after it (``add``: a message, ``two``: two, ``rewrite``: another
conversation), and the rewards of both."""


class RewardedTalk(MultiAgentEnv):
    """Two agents; each reads what was said."""

    possible_agents = ["a", "b"]  # noqa: RUF012

    def __init__(self, script: Sequence[Step]) -> None:
        self._script = script

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> MultiReset:
        """Begin."""
        super().reset(seed, options)
        self._number = 0
        self.acting = tuple(self._script[0][0])
        return {agent: self._view("add", f"you are {agent}") for agent in self.agents}, {"a": {}, "b": {}}

    def _view(self, kind: str, text: str) -> View:
        message = Message("user", text)
        if kind == "rewrite":
            return {"messages": Rewrite((message,))}
        return {"messages": (message, Message("user", "go on")) if kind == "two" else (message,)}

    def step(self, actions: dict[str, Message]) -> MultiStep:
        """Take the next step of the script."""
        _, kind, *amounts = self._script[self._number]
        self._number += 1
        said = " ".join(f"{agent}: {action.content}" for agent, action in sorted(actions.items()))
        agents, over = list(self.agents), self._number == len(self._script)
        if over:
            self.agents, self.acting = [], ()
        else:
            self.acting = tuple(self._script[self._number][0])
        views = {agent: self._view(kind, f"{self._number} {said}") for agent in agents}
        rewards = dict(zip(agents, map(float, amounts), strict=True))
        infos = {agent: {"metrics": {"steps": float(self._number)}} for agent in agents}
        return views, rewards, dict.fromkeys(agents, over), dict.fromkeys(agents, False), infos

    def forfeit(self, agent: str) -> dict[str, float]:
        """Cost one."""
        return {agent: -1.0}
