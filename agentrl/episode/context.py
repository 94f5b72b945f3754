"""What episodes run on."""

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
    """What episodes run on; one for all of them."""

    env_factory: Callable[[], Env]
    renderer: Renderer
    sampler: Sampler
    tool_clients: Mapping[str, ToolClient]
    limits: Limits
    sampling: SamplingParams
    """``max_new_tokens`` is shrunk to what the limits leave; each turn's own stop strings are added."""
    pool: Executor
    """Runs the plain methods of environments."""
    policy: str = "main"
    """Which policy of the sampler speaks."""
    served: Mapping[str, Tool] = field(default_factory=dict)
    """Tools of the run's servers by the tool's name, as the run's options make them."""

    def offered(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """Return ``tools`` as the policy may call them in this run: those of servers with the run's options.

        Raises:
            EnvironmentFailure: one is of a server that the run has not started.
        """
        for tool in tools:
            if tool.server:
                client_of(self.tool_clients, tool.server, tool.name)
        return tuple(self.served.get(tool.name, tool) if tool.server else tool for tool in tools)
