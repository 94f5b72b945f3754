"""What a generate function works with: the policy to talk to, the tools to call, and a recorder that sets the masks."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.utils import seeding

from agentrl.episode.conversation import Conversation
from agentrl.episode.outcome import as_rollout
from agentrl.episode.services import Services
from agentrl.episode.state import EpisodeState
from agentrl.episode.toolcalls import ToolRunner
from agentrl.task import Task
from agentrl.tool import Tool
from agentrl.types import Failure, Message, Rollout, StopReason, ToolCall, ToolResult


class Agent:
    """The policy and its tools in one episode; given to the function that ``rollout.generate`` names.

    Example::

        async def generate(task, agent):
            chat = agent.chat(task.prompt)
            while (said := await chat.sample(stop=("</search>",))) is not None:
                if "<search>" not in said.content:
                    break
                found = await agent.call("search", {"query": said.content})
                chat.add(Message("user", found.content, inline=True))
            return chat.rollout(reward=float(task.answer in said.content if said else False))
    """

    def __init__(self, services: Services, task: Task, *, seed: int, rollout_id: str, attempt: int = 0) -> None:
        """Begin an attempt at an episode; the runner does that."""
        self.task = task
        """The problem."""
        self.seed = seed
        """The episode's seed."""
        self.rng: np.random.Generator = seeding.np_random(seed)[0]
        """Seeded with it, as ``Env.np_random`` is: all randomness of an episode should come from here."""
        self.chats: list[Chat] = []
        """All that were begun, in order."""
        self._services = services
        self._state = EpisodeState(rollout_id, seed, attempt)
        self._runner = ToolRunner(services.tool_clients, self._state.episode_id)
        self._calls: Counter[str] = Counter()
        self._began = time.monotonic()
        self._deadline = asyncio.get_running_loop().time() + services.limits.max_seconds

    def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Chat:
        """Begin a conversation; each becomes a rollout of its own.

        Args:
            messages: what the policy reads first.
            tools: ``@tool`` coroutines that the policy is told of; its calls to them are in what `Chat.sample` returns.
        """
        first, number = self._state, len(self.chats)
        state = EpisodeState(f"{first.rollout_id}.{number}", first.seed, first.attempt) if number else first
        chat = Chat(self, Conversation(self._services, state, tools), messages)
        self.chats.append(chat)
        return chat

    async def call(self, name: str, arguments: Mapping[str, Any] | None = None) -> ToolResult:
        """Run a tool: one that a chat was given, or a registered one. A tool's own failure is a result with a status.

        Raises:
            ToolFailure: the server failed, after all retries.
        """
        self._calls[name] += 1
        call = ToolCall(f"{name}-{self._calls[name]}", name, arguments or {})
        own = tuple(tool for chat in self.chats for tool in chat.tools)
        (result,) = await self._runner.asked((call,), own)
        return result

    @property
    def seconds(self) -> float:
        """Wall time since the attempt began."""
        return time.monotonic() - self._began

    @property
    def deadline(self) -> float:
        """When ``rollout.max_seconds`` are over, on the event loop's clock."""
        return self._deadline

    def unfinished(self, reason: StopReason, failure: Failure | None = None) -> list[Rollout]:
        """Return what there is of an attempt that did not come to its end: all chats, or one empty rollout."""
        if not self.chats:
            return [as_rollout(self.task, self._state, reason, self.seconds, failure)]
        return [chat.cut(reason, failure) for chat in self.chats]

    async def close(self) -> None:
        """End the sessions of sampler and tools."""
        await self._runner.close()
        for chat in self.chats:
            await chat.close()


class Chat:
    """One conversation with the policy; made by `Agent.chat`.

    What it samples is trained on, whatever is added is only read: ids, log-probabilities and masks are recorded as
    they come, and no text is ever encoded again.
    """

    def __init__(self, agent: Agent, talk: Conversation, messages: Sequence[Message]) -> None:
        """Begin with ``messages``; `Agent.chat` does that."""
        self._agent = agent
        self._talk = talk
        self._said: Message | None = None
        self._new: list[Message] = []
        self._begun = self._sampling = False
        self.add(*messages)

    @property
    def rollout_id(self) -> str:
        """The id that this chat's rollout has."""
        return self._talk.state.rollout_id

    @property
    def tools(self) -> Sequence[Tool]:
        """Those that the policy is told of."""
        return self._talk.tools

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far."""
        said = () if self._said is None else (self._said,)
        return (*self._talk.state.messages, *said, *self._new)

    @property
    def stop_reason(self) -> StopReason | None:
        """Why `sample` returned None: the limit of turns, tokens or time, or an abort. None before that."""
        return self._talk.stop_reason

    def add(self, *messages: Message) -> None:
        """Add what the policy reads before it speaks again; ``inline`` messages continue its own turn.

        Raises:
            TypeError: not a `Message`.
        """
        for message in messages:
            if not isinstance(message, Message):
                raise TypeError(f"a chat takes agentrl.Message, not {message!r:.100}")
        self._new += messages

    async def sample(self, *, stop: Sequence[str] = ()) -> Message | None:
        """Let the policy speak, up to one of the ``stop`` strings or its end token, and return what it said.

        None once ``rollout.max_turns``, ``rollout.max_tokens`` or ``rollout.max_seconds`` is reached; `stop_reason` says
        which. What was sampled of a turn when time ran out is left out.

        Raises:
            ValueError: there is nothing to answer: no message yet, or none since the policy ended its turn.
            RuntimeError: the chat is sampling already.
            TaskError: the first messages leave no room within ``rollout.max_tokens``.
            SamplerError: the engine failed.
        """
        if self._sampling:
            raise RuntimeError("this chat is sampling already; sample side by side with several agent.chat(...)")
        self._sampling = True
        try:
            return await self._sample(stop)
        finally:
            self._sampling = False

    async def _sample(self, stop: Sequence[str]) -> Message | None:
        talk, deadline = self._talk, self._agent.deadline
        if talk.stop_reason is None and asyncio.get_running_loop().time() >= deadline:
            talk.stop_reason = StopReason.MAX_TIME
        if talk.stop_reason is not None:
            return None
        self._take_turn()
        clock = asyncio.timeout_at(deadline)
        try:
            async with clock:
                self._said = await talk.sample(stop)
        except TimeoutError:
            if not clock.expired():
                raise
            talk.stop_reason = StopReason.MAX_TIME
        return self._said

    def _take_turn(self) -> None:
        """Prepare the prompt of the next turn from what was added."""
        if not self._new and not self._begun:
            raise ValueError("a chat needs a message before the policy can speak: agent.chat([Message('user', …)])")
        if not self._new and self._talk.ended_its_turn:
            raise ValueError("the policy has ended its turn: chat.add(Message('user', …)) before it speaks again")
        said, new = self._said, tuple(self._new)
        if said is not None:
            self._talk.answer(said, new)
        else:
            assert not self._begun, "a turn that was not sampled has a stop reason"
            self._talk.begin(new, self._agent.task.id)
        self._begun, self._said = True, None
        self._new.clear()

    def rollout(
        self,
        reward: float = 0.0,
        *,
        metrics: Mapping[str, float] | None = None,
        stop_reason: StopReason | None = None,
    ) -> Rollout:
        """Return the conversation as a rollout.

        Args:
            reward: of all of it; a reward function (``reward.function``) replaces it.
            metrics: figures to average over rollouts and log.
            stop_reason: why it is over; by default the limit that ended it, else ``TERMINATED``.

        Raises:
            ValueError: the reward or a figure is no finite number.
        """
        figures = {"reward": float(reward), **{name: float(value) for name, value in (metrics or {}).items()}}
        for name, value in figures.items():
            if not math.isfinite(value):
                raise ValueError(f"chat.rollout: {name} is {value}; it must be a finite number")
        self._last_turn()
        state = self._talk.state
        state.reward = figures["reward"]
        state.metrics = {name: figures[name] for name in metrics or {}}
        if state.turns:
            state.turns[-1].reward = state.reward
        reason = stop_reason or self.stop_reason or StopReason.TERMINATED
        rollout = as_rollout(self._agent.task, state, reason, self._agent.seconds)
        rollout.dropped = self.stop_reason is StopReason.ABORTED
        return rollout

    def cut(self, reason: StopReason, failure: Failure | None) -> Rollout:
        """Return the conversation as the rollout of an episode that did not come to its end."""
        self._last_turn()
        reason = self.stop_reason or reason if failure is None else reason
        return as_rollout(self._agent.task, self._talk.state, reason, self._agent.seconds, failure)

    def _last_turn(self) -> None:
        if self._said is not None:
            self._talk.answer(self._said, self._new, over=True)
            self._said = None
            self._new.clear()

    async def close(self) -> None:
        """Say that no further turn comes."""
        await self._talk.close()
