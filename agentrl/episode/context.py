"""Shared resources of all episodes of a task source: renderer, sampler, tools, limits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from agentrl.core.chat_endpoint import ChatEndpoint
from agentrl.core.env import Env, EnvBase, tools_fault
from agentrl.core.errors import EnvironmentFailure
from agentrl.core.multi_agent_env import MultiAgentEnv
from agentrl.core.sampler import Sampler
from agentrl.core.tool import Tool, ToolClient
from agentrl.core.types import SamplingParams
from agentrl.core.user_code import describe, error_location
from agentrl.episode.limits import Limits
from agentrl.episode.tool_calls import find_client
from agentrl.render.base import Renderer

_log = logging.getLogger(__name__)

EnvFactory = Callable[[], Env | MultiAgentEnv]
"""Builds an environment for one episode."""


def offered_tools(env: EnvBase, served: Mapping[str, Tool]) -> tuple[Tool, ...]:
    """Return the tools of an environment: its own with the run's options, and all of its `EnvBase.offered_servers`.

    Args:
        env: the environment.
        served: tools of the run's servers by name, with the run's options.

    Raises:
        EnvironmentFailure: the environment's are none.
    """
    tools = env.tools
    if fault := tools_fault(tools):
        raise EnvironmentFailure(f"{type(env).__name__}.{fault}")
    own_tools = (served.get(tool.name, tool) if tool.server else tool for tool in tools)
    offered = (*own_tools, *(tool for tool in served.values() if tool.server in env.offered_servers))
    if fault := tools_fault(offered):
        raise EnvironmentFailure(f"{type(env).__name__}, with the tools of its offered_servers: {fault}")
    return offered


@dataclass(frozen=True, slots=True)
class EpisodeContext:
    """Resources that all episodes of a task source share."""

    env_factory: EnvFactory
    renderer: Renderer | None
    """Chat format of the policy; None with an endpoint."""
    sampler: Sampler | None
    """Samples the policy; None with an endpoint."""
    tool_clients: Mapping[str, ToolClient]
    limits: Limits
    sampling: SamplingParams
    """Parameters of every turn; ``max_new_tokens`` is reduced to what the limits leave, a turn's stop strings are added."""
    pool: Executor | None = None
    """Threads for the synchronous methods of environments; None calls them in the event loop's thread, for one episode at
    a time."""
    policy: str = "main"
    """Name of the policy at the sampler."""
    endpoint: ChatEndpoint | None = None
    """Plays the policy in place of a sampler."""
    served: Mapping[str, Tool] = field(default_factory=dict)
    """Tools of the run's servers by name, with the run's options."""
    logged: set[tuple[str, int]] = field(default_factory=set)
    """File and line of exceptions whose traceback was logged."""

    def resolve_tools(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """Return ``tools`` with those of servers replaced by the ones with the run's options.

        Raises:
            EnvironmentFailure: one is of a server that the run has not started.
        """
        for tool in tools:
            if tool.server:
                find_client(self.tool_clients, tool.server, tool.name)
        return tuple(self.served.get(tool.name, tool) if tool.server else tool for tool in tools)

    def offered_tools(self, env: EnvBase) -> tuple[Tool, ...]:
        """Return what an environment offers to the policy, with the run's options; `resolve_tools` checks it."""
        return offered_tools(env, self.served)

    def author_failure(self, function: str, error: BaseException) -> EnvironmentFailure:
        """Return the failure for an exception of an author's code, with its line. Its traceback is logged once a line.

        Args:
            function: that raised it, such as ``Guess.step``.
            error: the exception.
        """
        failure = EnvironmentFailure(f"{function} raised {describe(error)}")
        if (line := error_location(error)) not in self.logged:
            self.logged.add(line)
            _log.warning("%s; further tracebacks of this line are not shown", failure, exc_info=error)
        return failure
