"""One attempt at one episode of an environment."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from agentrl.core.env import Env, Step
from agentrl.core.errors import AgentrlError, EnvironmentFailure
from agentrl.core.task import Task
from agentrl.core.types import Message, Observation, Rewrite, StopReason
from agentrl.episode.context import EpisodeContext
from agentrl.episode.endpoint_conversation import open_conversation
from agentrl.episode.env_steps import EnvSteps, observed_messages
from agentrl.episode.env_threads import ThreadedEnv
from agentrl.episode.limits import EpisodeClock
from agentrl.episode.state import EpisodeState, SavedStates
from agentrl.episode.tool_calls import ToolRunner
from agentrl.obs.waiting import ROLLOUT, TURN, waiting

_log = logging.getLogger(__name__)


class Episode:
    """Runs an environment's episode to its end, or resumes one. ``state`` is always that of the last finished turn.

    Args:
        context: what all episodes share.
        task: the problem.
        state: a new one, or one from `EpisodeState.from_dict`.
        env_state: the environment's state, if the episode is resumed.
        tools: runs the tool calls; by default with the clients of ``context``.
        saved: saves the episode after its turns, if it can be resumed: the environment's class defines ``get_state``, and no
            tool server has a session of it.
    """

    def __init__(
        self,
        context: EpisodeContext,
        task: Task,
        state: EpisodeState,
        env_state: dict[str, object] | None = None,
        *,
        tools: ToolRunner | None = None,
        saved: SavedStates | None = None,
    ) -> None:
        self.state = state
        self._saved = saved
        self.conversation = open_conversation(context, state)
        """The conversation between policy and environment."""
        self.tools = tools or ToolRunner(context.tool_clients, task, state.episode_id, context.served)
        """Runs the tool calls. Its sessions stay open after `run`, for grading; ``tools.close()`` ends them."""
        self._context = context
        self._task = task
        self._env_state = env_state
        self._env = ThreadedEnv(context)
        self._steps = EnvSteps(self._env, self.tools, state)
        self._began = time.monotonic()
        self._clock: EpisodeClock

    @property
    def seconds(self) -> float:
        """Wall time used."""
        return self.state.seconds + time.monotonic() - self._began

    async def run(self) -> StopReason:
        """Run until the environment or a limit ends the episode.

        Raises:
            EpisodeError: something failed; ``state`` is that before the failed turn.
        """
        self._began = time.monotonic()
        self._clock = self.tools.clock = EpisodeClock(self._context.limits.max_seconds - self.state.counted_seconds)
        with waiting(ROLLOUT, self.state.episode_id, lambda: f"turn {self.state.counters.turns}"):
            try:
                async with self._clock:
                    await self._begin()
                    return await self._run_turns()
            except TimeoutError:
                if not self._clock.expired:
                    raise
                await self._truncate()
                return StopReason.MAX_TIME
            finally:
                await self._close()

    async def snapshot(self) -> dict[str, object]:
        """Return the state of episode and environment as JSON-able data."""
        return self._as_dict(await self._env.get_state())

    def _as_dict(self, env_state: dict[str, object]) -> dict[str, object]:
        counted = self._context.limits.max_seconds - self._clock.seconds_left
        return replace(self.state, seconds=self.seconds, counted_seconds=counted).to_dict(env_state)

    async def _begin(self) -> None:
        observation, info = await self._env.reset(self._task, self.state.env_seed)
        self._read_tools()
        if self._env_state is not None:
            await self._env.set_state(self._env_state)
            self._read_tools()
            return
        messages = await self._steps.begin(observation, info, self.conversation.tools)
        self._read_tools()
        self.conversation.begin(messages, self._task.id)

    def _read_tools(self) -> None:
        """Offer the environment's tools, which it may know only once the calls of its `reset` have results."""
        self.conversation.tools = self._context.resolve_tools(self._env.read("tools", self._context.offered_tools))

    async def _run_turns(self) -> StopReason:
        while True:
            with waiting(TURN, str(self.state.counters.turns + 1)):
                reason = await self._run_turn()
            if reason is not None:
                return reason
            await self._save_if_due()

    async def _save_if_due(self) -> None:
        """Save the episode, if it can be resumed and a save is due."""
        if self._saved is None or self.tools.has_sessions or type(self._env.env).get_state is Env.get_state:
            return
        if self._saved.is_due(self.state.rollout_id):
            env_state = await self._env.get_state()
            self._saved.save(self.state.rollout_id, self._task.id, lambda: self._as_dict(env_state))

    async def _run_turn(self) -> StopReason | None:
        """Run one turn; return why it ended the episode, or None if the episode continues."""
        conversation = self.conversation
        action = await self._sample()
        if action is None:
            assert conversation.stop_reason is not None, "sample sets it when it returns None"
            if conversation.stop_reason is not StopReason.ABORTED:
                await self._truncate()
            return conversation.stop_reason
        observation, reward, terminated, truncated, _ = await self._step(action)
        over = terminated or truncated
        if not over:
            self._check(observation)
        if isinstance(observation, Rewrite) and not over:
            conversation.record(action, observation.messages, reward=reward)
            conversation.rewrite(observation.messages)
            return None
        conversation.answer(action, observed_messages(observation), reward=reward, over=over)
        if not over:
            return None
        return StopReason.TERMINATED if terminated else StopReason.TRUNCATED

    async def _truncate(self) -> None:
        """Let the environment score an episode that a limit has ended, within another ``rollout.max_seconds``."""
        limit_s = self._context.limits.max_seconds
        clock = self.tools.clock = EpisodeClock(limit_s)
        try:
            async with clock:
                await self._steps.truncate(self.conversation.tools)
        except TimeoutError:
            if not clock.expired:
                raise
            raise EnvironmentFailure(
                f"{self._env.name} did not score the end of the episode within rollout.max_seconds={limit_s:g}"
            ) from None

    async def _sample(self) -> Message | None:
        with self._clock.pause():
            return await self.conversation.sample(self._env.read("stop", lambda env: tuple(env.stop)))

    def _check(self, observation: Observation) -> None:
        """Raise `EnvironmentFailure` if the policy would continue behind its own end token."""
        if not observed_messages(observation) and self.conversation.turn_ended:
            raise EnvironmentFailure(
                f"{self._env.name}.step returned no message although the policy has ended its turn: return a message, or "
                "end the episode with terminated or truncated"
            )

    async def _step(self, action: Message) -> Step:
        """Pass the policy's message to the environment, or its tool calls to the tools."""
        if not action.tool_calls or self._env.read("handles_tool_calls", lambda env: env.handles_tool_calls):
            return await self._steps.run_requested_calls(await self._env.step(action), self.conversation.tools)
        results = await self.tools.run_policy_calls(action.tool_calls, self.conversation.tools)
        answers = tuple(
            Message("tool", result.content, tool_call_id=result.call_id, images=result.images) for result in results
        )
        return answers, 0.0, False, False, {}

    async def _close(self) -> None:
        """End the sampler's session and close the environment. Failures are only logged: the episode is over."""
        await self.conversation.close()
        try:
            await self._env.close()
        except AgentrlError as error:
            _log.warning("episode %s was not closed: %s", self.state.episode_id, error)
