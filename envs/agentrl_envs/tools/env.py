"""Prompts, named tools and a reward function, over several turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from agentrl import Action, ConfigError, Env, Info, Message, Observation, Step, TaskError
from agentrl.core.named_tools import find_tools

KEY = "env.options.tools"


class ToolsEnv(Env):
    """Shows the task's prompt; the policy calls tools until a turn without a call, which is its answer and ends the episode.

    The reward comes from ``reward.function``. An episode that a limit ends has no answer: text next to a call is none.
    """

    blocking: ClassVar[bool] = False
    needs_reward: ClassVar[bool] = True

    def __init__(self, *, tools: str | Sequence[str] = (), system: str = "", stop: str | Sequence[str] = ()) -> None:
        """Set the tools and the texts around them.

        Args:
            tools: registered tools, ``mcp:NAME`` for an MCP server, or functions and tools as ``file.py:name``.
            system: a system message before the prompt; with ``{system}`` around the prompt's own, if it has one.
            stop: strings that end a turn.

        Raises:
            ConfigError: a tool does not exist, two have one name, or a stop string is empty.
        """
        named_tools = find_tools(tools, KEY)
        self.tools = named_tools.functions
        self.offered_servers = named_tools.servers
        self.system = system
        stops = (stop,) if isinstance(stop, str) and stop else tuple(stop)
        if not all(isinstance(text, str) and text for text in stops):
            raise ConfigError(f"env.options.stop={stop!r}: it must be a list of texts that are not empty")
        self.stop = stops  # type: ignore[misc]  # of the episode, not of the class

    @classmethod
    def registered_tools(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names among ``tools`` that run at a server."""
        return find_tools(options.get("tools", ()), KEY).servers

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Start an episode with the task's prompt, after the system message."""
        prompt, _ = super().reset(seed=seed, options=options)
        assert isinstance(prompt, tuple), "Env.reset returns messages"
        if not self.system:
            return prompt, {"final_answer": ""}
        has_system = bool(prompt) and prompt[0].role == "system"
        own_text, messages = (prompt[0].content, prompt[1:]) if has_system else ("", prompt)
        if own_text and "{system}" not in self.system:
            raise TaskError(
                f"env.options.system is set, and task {self.task.id!r} has a system message: leave it out, or write {{system}} "
                "where the task's is to be"
            )
        return (Message("system", self.system.replace("{system}", own_text).strip()), *messages), {"final_answer": ""}

    def step(self, action: Action) -> Step:
        """End the episode with the answer: the runner has run the calls of earlier turns."""
        assert isinstance(action, Message), "the environment requests no calls"
        return (), 0.0, True, False, {"final_answer": action.content}
