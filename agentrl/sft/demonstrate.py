"""Episodes of a scripted expert as training rows, for supervised fine-tuning.

A demonstration is an episode of the environment, as in training, whose sampler is the expert: the tokens that a policy is
trained on are the tokens that it observes and samples later.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence

from agentrl.core.env import Env
from agentrl.core.errors import EnvironmentFailure, SandboxFailure, TaskError, ToolFailure
from agentrl.core.task import Demonstrator, Task
from agentrl.core.tool import Tool, ToolClient
from agentrl.core.types import (
    CallStatus,
    FinishReason,
    ForkReason,
    Generation,
    Prompt,
    Row,
    SamplingParams,
    StopReason,
    ToolCall,
    ToolResult,
)
from agentrl.episode.context import EpisodeContext
from agentrl.episode.environment_episode import Episode
from agentrl.episode.limits import Limits
from agentrl.episode.state import EpisodeState
from agentrl.episode.tool_calls import ToolRunner
from agentrl.episode.trajectory import Trajectory
from agentrl.render.renderer import ChatRenderer


async def demonstrate(
    env_factory: Callable[[], Env],
    task: Task,
    expert: Demonstrator,
    *,
    seed: int,
    tool_clients: Mapping[str, ToolClient],
    renderer: ChatRenderer,
    max_turns: int,
    served: Mapping[str, Tool] | None = None,
) -> tuple[Row, float]:
    """Run one episode of ``expert`` and return its row and its reward.

    The expert's tokens have provenance ``DEMONSTRATED`` and mask 1. A turn that ends with none of the environment's
    stop strings ends with the end token, as the policy would have to sample it. The only limit is ``max_turns``: a row
    does not depend on the time that its episode took.

    Args:
        env_factory: builds the environment.
        task: the problem.
        expert: plays the policy's turns; calls tools in the words of the chat format.
        seed: of the environment.
        tool_clients: by registered name, for the tools of servers.
        renderer: of the policy's chat format.
        max_turns: turns of the expert.
        served: the servers' tools by name, as the run's options make them.

    Raises:
        TaskError: the tokens of an earlier turn would change when the template renders the next one.
        EnvironmentFailure: the environment failed or rewrote the conversation, or a tool does not exist or is unavailable.
    """
    state = EpisodeState(f"{task.id}/demonstration-{seed}", seed, trajectory=_Demonstration(task.id))
    context = EpisodeContext(
        env_factory,
        renderer,
        _ExpertSampler(expert, state, renderer),
        tool_clients,
        Limits(max_turns, max_tokens=sys.maxsize, max_seconds=math.inf, max_new_tokens=sys.maxsize),
        SamplingParams(max_new_tokens=sys.maxsize),
        pool=None,
        served=served or {},
    )
    episode = Episode(context, task, state, tools=_DemonstrationTools(tool_clients, task, state.episode_id, served))
    try:
        reason = await episode.run()
    finally:
        await episode.tools.close()
    if reason is StopReason.MAX_TURNS:  # the row ends with the answer to the last turn
        state.trajectory.extend_to(state.prompt_ids, added=state.added, fork=state.fork)
    [row] = state.trajectory.rows(task.id, state.rollout_id)
    return row, state.reward


class _ExpertSampler:
    """Samples the expert's turns in the episode of ``state``."""

    def __init__(self, expert: Demonstrator, state: EpisodeState, renderer: ChatRenderer) -> None:
        self._expert = expert
        self._state = state
        self._renderer = renderer
        self._observed = 0
        """Messages that the expert has seen or written."""

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, session_id: str, request_id: str, policy: str = "main"
    ) -> Generation:
        """Return what the expert says to the messages since its last turn. No engine gives its tokens a log-probability."""
        messages = self._state.messages
        text = self._expert.act(tuple(messages[self._observed :]))
        self._observed = len(messages) + 1
        end = () if text.endswith(params.stop) else (self._renderer.end_token_id,)
        return Generation((*self._renderer.encode(text), *end), (), FinishReason.STOP, (), request_id=request_id)

    async def abort(self, request_id: str) -> None:
        """Do nothing: the expert answers at once."""

    async def close_session(self, session_id: str) -> None:
        """Do nothing: there is an expert for each episode."""


class _Demonstration(Trajectory):
    """A trajectory of one row, all turns of which are demonstrated."""

    def __init__(self, task_id: str) -> None:
        super().__init__()
        self._task_id = task_id

    def append_sampled(self, generation: Generation) -> None:
        """Add the expert's tokens."""
        self.append_demonstrated(generation.token_ids)

    def extend_to(self, prompt_ids: Sequence[int], *, added: int | None = None, fork: ForkReason | None = None) -> int:
        """Extend the row to the end of a prompt; a prompt that does not continue the row is an error."""
        if fork is ForkReason.CONTEXT:
            raise EnvironmentFailure("the environment rewrites the conversation; one row cannot show the demonstration")
        if fork is not None:
            raise TaskError(
                f"task {self._task_id!r}: one row cannot show the demonstration: it would fork for the reason "
                f"{fork.value!r}; agentrl template check shows what the chat template changes"
            )
        return super().extend_to(prompt_ids, added=added)


class _DemonstrationTools(ToolRunner):
    """Runs tool calls. A tool that does not exist or is unavailable is an error: a row must not demonstrate it."""

    async def run_policy_calls(self, calls: Sequence[ToolCall], tools: Sequence[Tool]) -> tuple[ToolResult, ...]:
        """Run the calls.

        Raises:
            EnvironmentFailure: a tool does not exist or is unavailable.
        """
        tool_names = {tool.name for tool in tools}
        for call in calls:
            if call.status is CallStatus.OK and call.name not in tool_names:
                available = ", ".join(sorted(tool_names)) or "none"
                raise EnvironmentFailure(f"the episode calls tool {call.name!r}; there are: {available}")
        try:
            return await super().run_policy_calls(calls, tools)
        except (ToolFailure, SandboxFailure) as error:
            raise EnvironmentFailure(f"a tool is unavailable to demonstrations: {error}") from error
