"""Shared resources of all episodes of a run: renderer, sampler, tools, limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from agentrl.core.env import Env
from agentrl.core.sampler import Sampler
from agentrl.core.tool import Tool, ToolClient
from agentrl.core.types import SamplingParams
from agentrl.episode.limits import Limits
from agentrl.episode.tool_calls import client_of
from agentrl.render.base import Renderer


@dataclass(frozen=True, slots=True)
class EpisodeContext:
    """Resources that all episodes of a run share."""

    env_factory: Callable[[], Env]
    renderer: Renderer
    sampler: Sampler
    tool_clients: Mapping[str, ToolClient]
    limits: Limits
    sampling: SamplingParams
    """Parameters of every turn; ``max_new_tokens`` is reduced to what the limits leave, a turn's stop strings are added."""
    pool: Executor | None
    """Threads for the synchronous methods of environments; None calls them in the event loop's thread, for one episode at
    a time."""
    policy: str = "main"
    """Name of the policy at the sampler."""
    served: Mapping[str, Tool] = field(default_factory=dict)
    """Tools of the run's servers by name, with the run's options."""

    def offered(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """Return ``tools`` with those of servers replaced by the ones with the run's options.

        Raises:
            EnvironmentFailure: one is of a server that the run has not started.
        """
        for tool in tools:
            if tool.server:
                client_of(self.tool_clients, tool.server, tool.name)
        return tuple(self.served.get(tool.name, tool) if tool.server else tool for tool in tools)
