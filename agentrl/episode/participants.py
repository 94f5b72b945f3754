"""The agents of a multi-agent episode, each with its conversation so far."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from agentrl.core.errors import EnvironmentFailure
from agentrl.core.lineup import PolicySeat
from agentrl.core.multi_agent_env import MultiAgentEnv, PlayerFactory
from agentrl.core.task import Task
from agentrl.core.types import Failure, FinishReason, Info, Message, Rewrite, Rollout, StopReason, Turn, json_state
from agentrl.episode.context import EpisodeContext
from agentrl.episode.endpoint_conversation import open_conversation
from agentrl.episode.env_threads import ThreadedMultiAgentEnv
from agentrl.episode.limits import EpisodeClock
from agentrl.episode.state import EpisodeState
from agentrl.episode.tool_calls import ToolRunner


class Participant(ABC):
    """One agent in one episode.

    Args:
        agent: its name in the environment.
        state: of its conversation; reward, metrics and turns are kept there for every kind of player.
    """

    def __init__(self, agent: str, state: EpisodeState) -> None:
        self.agent = agent
        self.state = state
        self.over: StopReason | None = None
        """Why the agent has left the episode."""
        self._new: list[Message] = []  # read in the next turn
        self._rewritten = False  # whether they replace the conversation
        self._turn_steps: list[int] = []
        self._step = 0  # of the environment
        self._reply: Message | None = None  # the last turn, until it is recorded
        self._reward = 0.0  # since the last turn

    def observe(self, messages: tuple[Message, ...] | Rewrite) -> None:
        """Take messages that the agent reads in its next turn."""
        if isinstance(messages, Rewrite):
            self._new, self._rewritten = list(messages.messages), True
        else:
            self._new.extend(messages)

    def receive(self, reward: float, metrics: Mapping[str, float] | None) -> None:
        """Take a reward, which counts for the last turn, and the latest metrics."""
        self.state.reward += reward
        self._reward += reward
        if metrics is not None:
            self.state.metrics = dict(metrics)

    async def act(self, info: Info, step: int) -> Message | None:
        """Take a turn in a step of the environment.

        Return the agent's message, or None if it has no turns or tokens left (``over`` then has the reason).
        """
        self._step = step
        self._reply = await self._act(info)
        if self._reply is not None:
            self._turn_steps.append(step)
        return self._reply

    @abstractmethod
    async def _act(self, info: Info) -> Message | None:
        """Read the new messages after the last turn, and return the next one."""

    def leave(self, reason: StopReason) -> None:
        """Record why and with what the agent's episode ends."""
        self.over = self.over or reason
        self._record_last()
        turns = self.state.turns
        if turns:
            turns[-1].reward += self._reward
        self._reward = 0.0

    @property
    def reward(self) -> float:
        """Reward of the episode so far."""
        return self.state.reward

    @property
    def turn_steps(self) -> Sequence[int]:
        """For each of its turns the environment's step, from 0."""
        return self._turn_steps

    @property
    def moves(self) -> Sequence[str]:
        """Its turns as text."""
        return tuple(turn.action for turn in self.state.turns)

    def _record_last(self) -> None:
        """Record the last turn, if it was not."""
        if self._reply is not None:
            self._record(self._reply, FinishReason.STOP)
            self._reply = None

    def _record(self, reply: Message, reason: FinishReason) -> None:
        observation = "".join(message.content for message in self._new)
        self.state.turns.append(Turn(reply.content, observation, reason, self._reward))
        self._reward = 0.0

    def _take_new(self) -> tuple[Message, ...]:
        """Record the last turn with its answer, and return the messages of the next one."""
        if self._reply is None and not self.state.turns:
            self.state.prompt = "".join(message.content for message in self._new)
        self._record_last()
        new, self._new, self._rewritten = tuple(self._new), [], False
        return new

    def rollout(self, task: Task, *, seconds: float, tool_seconds: float, failure: Failure | None) -> Rollout:
        """Return what the agent did; only a policy has rows."""
        state = self.state
        return Rollout(
            prompt_id=task.id,
            rollout_id=state.rollout_id,
            rows=[],
            reward=state.reward,
            stop_reason=self.over or StopReason.FAILED,
            metrics=state.metrics,
            turns=state.turns,
            prompt=state.prompt,
            failure=failure,
            seconds=seconds,
            tool_seconds=tool_seconds,
            metadata=dict(task.metadata),
            label=json_state(task.answer),
            agent=self.agent,
        )

    def check_time(self) -> None:
        """Check that the agent is not why the episode has reached its time limit.

        Raises:
            EpisodeError: it is.
        """
        return

    async def close(self) -> None:
        """End the agent's session, if it has one."""
        return


class SeatProgram(Protocol):
    """Plays an agent with a program whose model is the policy of the seat."""

    def join(
        self,
        agent: str,
        seat: PolicySeat,
        context: EpisodeContext,
        state: EpisodeState,
        task: Task,
        tools: ToolRunner,
        clock: EpisodeClock,
    ) -> Participant:
        """Return the participant of an episode.

        Args:
            agent: its name in the environment.
            seat: the policy that is the program's model.
            context: the model and limits, with the name of this agent's policy.
            state: of its conversation.
            task: of the episode.
            tools: runs the tool calls of the episode.
            clock: of the episode.
        """
        ...


class ScriptedParticipant(Participant):
    """An agent that a scripted player plays, in the environment's threads.

    Args:
        agent: its name in the environment.
        state: of its conversation.
        name: of the player, for messages.
        factory: makes the player.
        env: runs its code.
    """

    def __init__(
        self, agent: str, state: EpisodeState, name: str, factory: PlayerFactory, env: ThreadedMultiAgentEnv
    ) -> None:
        super().__init__(agent, state)
        seat = env.env.possible_agents.index(agent)
        self._player = factory(np.random.default_rng([state.seed, seat]))
        self._name = name
        self._env = env

    async def _act(self, info: Info) -> Message | None:
        new, moves = self._take_new(), tuple(info.get("legal_moves", ()))
        text = await self._env.act(self._name, lambda: self._player.act(new, moves))
        if not isinstance(text, str):
            raise EnvironmentFailure(f"the player {self._name} must return a text, it returned {text!r:.100}")
        return Message("assistant", text)


class PolicyParticipant(Participant):
    """An agent that a policy, or another model, plays: token by token, or at an endpoint.

    Args:
        agent: its name in the environment.
        context: the model and limits, with the name of this agent's policy.
        state: of its conversation.
        task: of the episode.
        env: of the episode.
        tools: runs its tool calls.
        clock: of the episode.
    """

    def __init__(
        self,
        agent: str,
        context: EpisodeContext,
        state: EpisodeState,
        task: Task,
        env: MultiAgentEnv,
        tools: ToolRunner,
        clock: EpisodeClock,
    ) -> None:
        super().__init__(agent, state)
        self.conversation = open_conversation(context, state, context.resolve_tools(context.offered_tools(env)))
        self._task = task
        self._env = env
        self._tools = tools
        self._clock = clock
        self._begun = False

    async def _act(self, info: Info) -> Message | None:
        self._read()
        reply = await self._sample()
        while reply is not None and reply.tool_calls and not self._env.handles_tool_calls:
            results = await self._tools.run_policy_calls(reply.tool_calls, self.conversation.tools)
            answers = [
                Message("tool", result.content, tool_call_id=result.call_id, images=result.images) for result in results
            ]
            self.conversation.answer(reply, answers)
            self._turn_steps.append(self._step)
            reply = await self._sample()
        if reply is None:
            self.over = self.conversation.stop_reason
        return reply

    def _read(self) -> None:
        """Prepare the prompt of the next turn."""
        conversation, new = self.conversation, tuple(self._new)
        who = f"{type(self._env).__name__}: the agent {self.agent!r} acts"
        if not self._begun:
            if not new:
                raise EnvironmentFailure(f"{who} and has read no message yet")
            conversation.begin(new, self._task.id)
        elif self._rewritten:
            self._record_last()
            conversation.rewrite(new)
        else:
            assert self._reply is not None, "an agent that has no turns left does not act"
            if not new and conversation.turn_ended:
                raise EnvironmentFailure(f"{who} again and has read no message since it ended its turn")
            conversation.answer(self._reply, new, reward=self._reward)
        self._begun, self._reward, self._reply, self._rewritten = True, 0.0, None, False
        self._new.clear()

    async def _sample(self) -> Message | None:
        with self._clock.pause():
            return await self.conversation.sample(self._env.stop)

    def _record(self, reply: Message, reason: FinishReason) -> None:
        self.conversation.record(reply, self._new, reward=self._reward)
        self._reward = 0.0

    def rollout(self, task: Task, *, seconds: float, tool_seconds: float, failure: Failure | None) -> Rollout:
        """Return the agent's conversation as a rollout."""
        reason = self.over or StopReason.FAILED
        return self.conversation.rollout(
            task, reason, seconds=seconds, tool_seconds=tool_seconds, failure=failure, agent=self.agent
        )

    async def close(self) -> None:
        """End the session at the sampler."""
        await self.conversation.close()
