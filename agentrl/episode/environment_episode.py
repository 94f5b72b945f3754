"""One attempt at one episode of an environment."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from agentrl.core.env import Step
from agentrl.core.errors import AgentrlError, EnvironmentFailure
from agentrl.core.task import Task
from agentrl.core.types import Info, Message, Observation, Rewrite, StopReason, ToolCalls, ToolResults
from agentrl.episode.context import EpisodeContext
from agentrl.episode.conversation import Conversation
from agentrl.episode.env_threads import ThreadedEnv
from agentrl.episode.state import EpisodeState
from agentrl.episode.tool_calls import ToolRunner
from agentrl.obs.waiting import waiting

_log = logging.getLogger(__name__)


class Episode:
    """Plays a task to its end, or goes on with one from its state. ``state`` is always that of the last finished turn.

    Args:
        context: what it runs on.
        task: the problem.
        state: a fresh one, or one from `EpisodeState.from_dict`.
        env_state: the environment's, where the episode is gone on with.
    """

    def __init__(
        self, context: EpisodeContext, task: Task, state: EpisodeState, env_state: dict[str, object] | None = None
    ) -> None:
        self.state = state
        self._context = context
        self._task = task
        self._env_state = env_state
        self._env = ThreadedEnv(context.env_factory, context.pool)
        self._conversation = Conversation(context, state)
        self.tools = ToolRunner(context.tool_clients, state.episode_id, context.served)
        """Its sessions outlive `play`, for whoever scores the episode; ``tools.close()`` ends them."""
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Wall time used."""
        return self.state.seconds + time.monotonic() - self._began

    async def play(self) -> StopReason:
        """Play until the environment or a limit ends it. What an unfinished turn sampled when time is up is left out.

        Raises:
            EpisodeError: something failed; ``state`` holds what there was before.
        """
        self._began = time.monotonic()
        clock = asyncio.timeout(self._context.limits.max_seconds - self.state.seconds)
        with waiting("rollout", self.state.episode_id, lambda: f"turn {self.state.shared.turns}"):
            try:
                async with clock:
                    await self._begin()
                    return await self._turns()
            except TimeoutError:
                if not clock.expired():
                    raise
                return StopReason.MAX_TIME
            finally:
                await self._close()

    async def snapshot(self) -> dict[str, object]:
        """Return the state as JSON-able data, the environment's within."""
        env_state = await self._env.get_state()
        return replace(self.state, seconds=self.seconds).to_dict(env_state)

    async def _begin(self) -> None:
        observation, info = await self._env.reset(self._task, self.state.seed)
        self._conversation.tools = self._context.offered(self._env.env.tools)
        if self._env_state is not None:
            await self._env.set_state(self._env_state)
            return
        step = await self._settle((observation, 0.0, False, False, info))
        if isinstance(step[0], Rewrite):
            raise EnvironmentFailure(
                f"{type(self._env.env).__name__} begins an episode with a Rewrite; only step may give one"
            )
        self._conversation.begin(_messages(step[0]), self._task.id)

    async def _turns(self) -> StopReason:
        conversation, env = self._conversation, self._env.env
        while (said := await conversation.sample(env.stop)) is not None:
            observation, reward, terminated, truncated, _ = await self._hear(said)
            over = terminated or truncated
            if isinstance(observation, Rewrite) and not over:
                conversation.record(said, observation.messages, reward=reward)
                conversation.rewrite(observation.messages)
                continue
            conversation.answer(said, _messages(observation), reward=reward, over=over)
            if over:
                return StopReason.TERMINATED if terminated else StopReason.TRUNCATED
        assert conversation.stop_reason is not None, "sample says why it returned nothing"
        return conversation.stop_reason

    async def _hear(self, said: Message) -> Step:
        """Give the environment, or the tools that the policy calls, what it said."""
        if not said.tool_calls or self._env.env.handles_tool_calls:
            return await self._settle(await self._env.step(said))
        results = await self.tools.run_policy_calls(said.tool_calls, self._conversation.tools)
        answers = tuple(Message("tool", result.content, tool_call_id=result.call_id) for result in results)
        return answers, 0.0, False, False, {}

    async def _settle(self, step: Step) -> Step:
        """Run the calls that an environment asks for until it answers with messages; sum the rewards on the way."""
        observation, reward, terminated, truncated, info = step
        total = self._count(reward, info)
        while isinstance(observation, ToolCalls) and not (terminated or truncated):
            results = await self.tools.run_environment_calls(observation.calls, self._conversation.tools)
            observation, reward, terminated, truncated, info = await self._env.step(ToolResults(results))
            total += self._count(reward, info)
        return observation, total, terminated, truncated, info

    def _count(self, reward: float, info: Info) -> float:
        """Add a reward, take over the latest metrics, and return the reward."""
        self.state.reward += float(reward)
        if "metrics" in info:
            self.state.metrics = {key: float(value) for key, value in info["metrics"].items()}
        return float(reward)

    async def _close(self) -> None:
        """End the sampler's session and the environment. What cannot be told is only logged: the episode is over."""
        await self._conversation.close()
        try:
            await self._env.close()
        except AgentrlError as error:
            _log.warning("episode %s was not closed: %s", self.state.episode_id, error)


def _messages(observation: Observation) -> tuple[Message, ...]:
    if isinstance(observation, Rewrite):
        return observation.messages
    return () if isinstance(observation, ToolCalls) else observation  # calls that came with the end are not run
