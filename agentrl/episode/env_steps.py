"""Steps of an environment with the tool calls that it requests, and the score that it gives to a final answer."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from agentrl.core.env import Step
from agentrl.core.errors import AgentrlError, EnvironmentFailure
from agentrl.core.task import Task
from agentrl.core.tool import Tool
from agentrl.core.types import Info, Message, Observation, Rewrite, ToolCalls, ToolResults
from agentrl.episode.context import EpisodeContext
from agentrl.episode.env_threads import ThreadedEnv
from agentrl.episode.limits import EpisodeClock
from agentrl.episode.state import EpisodeState
from agentrl.episode.tool_calls import ToolRunner

_log = logging.getLogger(__name__)


class EnvSteps:
    """Runs the tool calls that an environment requests, and keeps its rewards and metrics.

    Args:
        env: of the episode.
        tools: runs the calls.
        state: gets rewards and metrics.
    """

    def __init__(self, env: ThreadedEnv, tools: ToolRunner, state: EpisodeState) -> None:
        self._env = env
        self._tools = tools
        self._state = state
        self.machine: Mapping[str, object] | None = None
        """Access to the machine of the episode, as the environment's last ``info`` has it; see `Env.opens_machine`."""

    async def run_requested_calls(self, step: Step, offered: Sequence[Tool]) -> Step:
        """Run the tool calls that an environment requests until it returns messages; the rewards on the way are summed.

        Args:
            step: what the environment returned.
            offered: tools of the policy, which the environment may call, too.
        """
        observation, reward, terminated, truncated, info = step
        total = self._record(reward, info)
        while isinstance(observation, ToolCalls) and not (terminated or truncated):
            results = await self._tools.run_environment_calls(observation.calls, offered)
            observation, reward, terminated, truncated, info = await self._env.step(ToolResults(results))
            total += self._record(reward, info)
        return observation, total, terminated, truncated, info

    async def begin(self, observation: Observation, info: Info, offered: Sequence[Tool]) -> tuple[Message, ...]:
        """Return the first messages of an episode, once the tool calls that `Env.reset` requests were run.

        Raises:
            EnvironmentFailure: there are none.
        """
        step = await self.run_requested_calls((observation, 0.0, False, False, info), offered)
        if isinstance(step[0], Rewrite):
            raise EnvironmentFailure(f"{self._env.name} begins an episode with a Rewrite; only step may give one")
        messages = observed_messages(step[0])
        if not messages:
            raise EnvironmentFailure(
                f"{self._env.name}.reset returned no message, so there is nothing for the policy to read"
            )
        return messages

    async def truncate(self, offered: Sequence[Tool]) -> None:
        """Add the reward that the environment gives to an episode that a limit ends: to its last turn, if it has one.

        Args:
            offered: tools of the policy, which the environment may call, too.
        """
        returned = await self._env.truncate()
        if isinstance(returned, ToolCalls):
            _, reward, *_ = await self.run_requested_calls((returned, 0.0, False, False, {}), offered)
        else:
            reward = self._record(*returned)
        if self._state.turns and reward:
            self._state.turns[-1] = replace(self._state.turns[-1], reward=self._state.turns[-1].reward + reward)

    def _record(self, reward: float, info: Info) -> float:
        """Add a reward to the episode's, keep the latest metrics, and return the reward."""
        number = self._env.number(reward, "the reward")
        self._state.reward += number
        if (metrics := self._env.metrics(info)) is not None:
            self._state.metrics = metrics
        if (answer := self._env.answer(info)) is not None:
            self._state.answer = answer
        self.machine = info.get("machine")
        return number


def observed_messages(observation: Observation) -> tuple[Message, ...]:
    """Return the messages of an observation; calls of a last step are not run."""
    if isinstance(observation, Rewrite):
        return observation.messages
    return () if isinstance(observation, ToolCalls) else observation


class AnswerScoring:
    """The environment of an episode that something else plays: it writes the prompt, and scores the final answer.

    Args:
        context: of the task source.
        task: the problem.
        state: has the seed, and gets reward and metrics; no other conversation has it.
        tools: runs the tool calls of the environment.
    """

    def __init__(self, context: EpisodeContext, task: Task, state: EpisodeState, tools: ToolRunner) -> None:
        self._limit_s = context.limits.max_seconds
        self._env = ThreadedEnv(context)
        self._context = context
        self._task = task
        self._state = state
        self._tools = tools
        self._steps = EnvSteps(self._env, tools, state)
        self._offered: Sequence[Tool] = ()

    async def begin(self) -> tuple[Message, ...]:
        """Start the environment, and return its first messages.

        Raises:
            EpisodeError: it failed, or takes longer than ``rollout.max_seconds``.
        """
        async with self._in_time("begin"):
            observation, info = await self._env.reset(self._task, self._state.env_seed)
            self._offered = self._context.resolve_tools(self._env.read("tools", self._context.offered_tools))
            return await self._steps.begin(observation, info, self._offered)

    @property
    def machine(self) -> Mapping[str, object] | None:
        """Access to the machine of the episode; None: the environment opens none. See `Env.opens_machine`."""
        return self._steps.machine

    @property
    def reward(self) -> float:
        """The reward so far."""
        return self._state.reward

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics so far."""
        return self._state.metrics

    async def score(self, answer: str) -> tuple[Message, ...]:
        """Take the final answer as the policy's message; return what follows it if the environment continues, else nothing.

        Raises:
            EpisodeError: it failed, or takes longer than ``rollout.max_seconds``.
        """
        async with self._in_time("score the final answer"):
            step = await self._env.step(Message("assistant", answer))
            observation, _, terminated, truncated, _ = await self._steps.run_requested_calls(step, self._offered)
        return () if terminated or truncated else observed_messages(observation)

    async def close(self) -> None:
        """Close the environment. A failure is only logged: the episode is over."""
        try:
            await self._env.close()
        except AgentrlError as error:
            _log.warning("episode %s was not closed: %s", self._state.episode_id, error)

    @asynccontextmanager
    async def _in_time(self, action: str) -> AsyncIterator[None]:
        clock, tools_clock = EpisodeClock(self._limit_s), self._tools.clock
        self._tools.clock = clock
        try:
            async with clock:
                yield
        except TimeoutError:
            if not clock.expired:
                raise
            raise EnvironmentFailure(
                f"{self._env.name} did not {action} within rollout.max_seconds={self._limit_s:g}"
            ) from None
        finally:
            self._tools.clock = tools_clock
