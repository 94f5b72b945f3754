"""Episodes of a scripted expert as training rows, for supervised fine-tuning.

A demonstration is an episode of the environment, as in training, whose sampler is the expert: the tokens that a policy is
trained on are the tokens that it observes and samples later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from typing_extensions import override

from agentrl.core.env import Env
from agentrl.core.errors import EnvironmentFailure, SandboxFailure, TaskError, ToolFailure
from agentrl.core.images import Image, PlacedImage
from agentrl.core.task import Demonstrator, Task
from agentrl.core.tool import Tool, ToolClient
from agentrl.core.types import CallStatus, ForkReason, Row, StopReason, ToolCall, ToolResult
from agentrl.episode.environment_episode import Episode
from agentrl.episode.state import EpisodeState
from agentrl.episode.tool_calls import ToolRunner
from agentrl.render.renderer import ChatRenderer
from agentrl.sft.scripted import DemonstratedTrajectory, scripted_context


class Demonstration(NamedTuple):
    """An episode of a scripted expert."""

    row: Row
    """Its tokens."""
    reward: float
    """Reward of the expert's episode, its mistakes included."""
    images: Mapping[str, Image]
    """Images of the row, by digest."""


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
) -> Demonstration:
    """Run one episode of ``expert``.

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
    state = EpisodeState(f"{task.id}/demonstration-{seed}", seed, trajectory=_OneRowTrajectory(task.id))
    observed = 0  # messages that the expert has seen or written

    def say(stop: tuple[str, ...]) -> tuple[int, ...]:
        nonlocal observed
        text = expert.act(tuple(state.messages[observed:]))
        observed = len(state.messages) + 1
        return (*renderer.encode(text), *(() if text.endswith(stop) else (renderer.end_token_id,)))

    context = scripted_context(env_factory, renderer, say, tool_clients, max_turns, served)
    episode = Episode(context, task, state, tools=_DemonstrationTools(tool_clients, task, state.episode_id, served))
    try:
        reason = await episode.run()
    finally:
        await episode.tools.close()
    if reason is StopReason.MAX_TURNS:  # the row ends with the answer to the last turn
        state.trajectory.extend_to(state.prompt_ids, images=state.images, added=state.added, fork=state.fork)
    [row] = state.trajectory.rows(task.id, state.rollout_id)
    return Demonstration(row, state.reward, dict(state.trajectory.images))


class _OneRowTrajectory(DemonstratedTrajectory):
    """A trajectory of one row."""

    def __init__(self, task_id: str) -> None:
        super().__init__()
        self._task_id = task_id

    @override
    def extend_to(
        self,
        prompt_ids: Sequence[int],
        *,
        images: Sequence[PlacedImage] = (),
        added: int | None = None,
        fork: ForkReason | None = None,
    ) -> int:
        """Extend the row; a prompt that does not continue it is an error."""
        if fork is ForkReason.CONTEXT:
            raise EnvironmentFailure("the environment rewrites the conversation; one row cannot show the demonstration")
        if fork is not None:
            raise TaskError(
                f"task {self._task_id!r}: one row cannot show the demonstration: it would fork for the reason "
                f"{fork.value!r}; agentrl template check shows what the chat template changes"
            )
        return super().extend_to(prompt_ids, images=images, added=added)


class _DemonstrationTools(ToolRunner):
    """Runs tool calls. A tool that does not exist or is unavailable is an error: a row must not demonstrate it."""

    @override
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
