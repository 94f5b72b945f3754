"""Scripted turns in the place of sampled ones: a sampler that says them, and a trajectory that demonstrates them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping

from typing_extensions import override

from agentrl.core.sampler import Sampler
from agentrl.core.tool import Tool, ToolClient
from agentrl.core.types import FinishReason, Generation, Prompt, SamplingParams
from agentrl.episode.context import EnvFactory, EpisodeContext
from agentrl.episode.limits import Limits
from agentrl.episode.trajectory import Trajectory
from agentrl.render.renderer import ChatRenderer


def scripted_context(
    env_factory: EnvFactory,
    renderer: ChatRenderer,
    say: Callable[[tuple[str, ...]], tuple[int, ...]],
    tool_clients: Mapping[str, ToolClient],
    max_turns: int = sys.maxsize,
    served: Mapping[str, Tool] | None = None,
) -> EpisodeContext:
    """Return the resources of an episode without limits but that of turns, in which the policy says what ``say`` returns.

    Args:
        env_factory: builds the environment.
        renderer: of the policy's chat format.
        say: from the stop strings of a turn to its ids.
        tool_clients: by registered name, for the tools of servers.
        max_turns: of the policy.
        served: the servers' tools by name, as the run's options make them.
    """
    return EpisodeContext(
        env_factory,
        renderer,
        _ScriptedSampler(say),
        tool_clients,
        Limits(max_turns, max_tokens=sys.maxsize, max_seconds=math.inf, max_new_tokens=sys.maxsize),
        SamplingParams(max_new_tokens=sys.maxsize),
        served=served or {},
    )


class _ScriptedSampler(Sampler):
    """Says the turns of one episode. No engine gives their tokens a log-probability."""

    def __init__(self, say: Callable[[tuple[str, ...]], tuple[int, ...]]) -> None:
        self._say = say

    @override
    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, session_id: str, request_id: str, policy: str = "main"
    ) -> Generation:
        return Generation(self._say(params.stop), (), FinishReason.STOP, (), request_id=request_id)

    @override
    async def abort(self, request_id: str) -> None:
        """Do nothing: every turn is available immediately."""

    @override
    async def close_session(self, session_id: str) -> None:
        """Do nothing: a sampler has one episode."""


class DemonstratedTrajectory(Trajectory):
    """A trajectory whose turns are demonstrated.

    Args:
        observed_turns: the turns that are only observed, by their numbers from 0.
    """

    def __init__(self, observed_turns: Collection[int] = ()) -> None:
        super().__init__()
        self._observed_turns = observed_turns
        self._turn = 0

    @override
    def append_sampled(self, generation: Generation) -> None:
        """Add the tokens of a turn."""
        self._turn += 1
        if self._turn - 1 in self._observed_turns:
            self.extend_to((*self.token_ids, *generation.token_ids), added=len(generation.token_ids))
        else:
            self.append_demonstrated(generation.token_ids)
