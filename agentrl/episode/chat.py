"""What a generate function works with: the policy to talk to, the tools to call, and a recorder that sets the masks."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.utils import seeding

from agentrl.core.task import Task
from agentrl.core.tool import Tool
from agentrl.core.types import Failure, ForkReason, Message, Rollout, StopReason, ToolCall, ToolResult
from agentrl.episode.context import EpisodeContext
from agentrl.episode.conversation import Conversation
from agentrl.episode.result import as_rollout
from agentrl.episode.state import EpisodeState
from agentrl.episode.tool_calls import ToolRunner


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

    def __init__(self, context: EpisodeContext, task: Task, *, seed: int, rollout_id: str, attempt: int = 0) -> None:
        """Begin an attempt at an episode; the runner does that."""
        self.task = task
        """The problem."""
        self.seed = seed
        """The episode's seed."""
        self.rng: np.random.Generator = seeding.np_random(seed)[0]
        """Seeded with it, as ``Env.np_random`` is: all randomness of an episode should come from here."""
        self.chats: list[Chat] = []
        """All that were begun, in order."""
        self._context = context
        self._state = EpisodeState(rollout_id, seed, attempt)
        self.tools = ToolRunner(context.tool_clients, self._state.episode_id, context.served)
        """Runs its calls. Its sessions outlive the attempt, for whoever scores it."""
        self._calls: Counter[str] = Counter()
        self._began = time.monotonic()
        self._deadline = asyncio.get_running_loop().time() + context.limits.max_seconds

    def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Chat:
        """Begin a conversation; each becomes a rollout of its own.

        Args:
            messages: what the policy reads first.
            tools: ``@tool`` coroutines that the policy is told of; its calls to them are in what `Chat.sample` returns.
        """
        first, number = self._state, len(self.chats)
        state = EpisodeState(f"{first.rollout_id}.{number}", first.seed, first.attempt) if number else first
        chat = Chat(self, Conversation(self._context, state, self._context.offered(tools)), messages)
        self.chats.append(chat)
        return chat

    async def call(self, name: str, arguments: Mapping[str, Any] | None = None) -> ToolResult:
        """Run a tool: one that a chat was given, or a registered one. A tool's own failure is a result with a status.

        Raises:
            ToolFailure, SandboxFailure: the server failed, after all retries.
        """
        self._calls[name] += 1
        call = ToolCall(f"{name}-{self._calls[name]}", name, arguments or {})
        own = tuple(tool for chat in self.chats for one in chat.all_chats() for tool in one.tools)
        (result,) = await self.tools.run_environment_calls((call,), own)
        return result

    def offered(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """Return ``tools`` as this run offers them to the policy: those of servers with the run's options."""
        return self._context.offered(tools)

    @property
    def episode_id(self) -> str:
        """Names this attempt to engines and tools."""
        return self._state.episode_id

    @property
    def turns(self) -> int:
        """Turns that the policy has begun, in all chats."""
        return sum(chat.turns for chat in self.chats)

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
            return [as_rollout(self.task, self._state, reason, self.seconds, self.tools.seconds, failure)]
        return [chat.cut(reason, failure) for chat in self.chats]

    async def close(self) -> None:
        """End the sampler's session."""
        for chat in self.chats:
            await chat.close()


class Chat:
    """One conversation with the policy; made by `Agent.chat`, or by `branch` within the same rollout.

    What it samples is trained on, whatever is added is only read: ids, log-probabilities and masks are recorded as
    they come, and no text is ever encoded again. Branches may sample at the same time.
    """

    def __init__(self, agent: Agent, conversation: Conversation, messages: Sequence[Message]) -> None:
        """Begin with ``messages``; `Agent.chat` does that."""
        self.branches: list[Chat] = []
        """Those that were begun by `branch`, in order."""
        self._agent = agent
        self._conversation = conversation
        self._said: Message | None = None
        self._new: list[Message] = []
        self._begun = self._sampling = False
        self._anew: ForkReason | None = None  # why the next prompt is made of the new messages alone
        self.add(*messages)

    @property
    def rollout_id(self) -> str:
        """The id that this chat's rollout has, and its branches'."""
        return self._conversation.state.rollout_id

    @property
    def turns(self) -> int:
        """Turns that the policy has begun in this chat and its branches."""
        return self._conversation.state.shared.turns

    @property
    def tools(self) -> Sequence[Tool]:
        """Those that the policy is told of."""
        return self._conversation.tools

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far."""
        before = () if self._anew else tuple(self._conversation.state.messages)
        said = () if self._said is None else (self._said,)
        return (*before, *said, *self._new)

    @property
    def stop_reason(self) -> StopReason | None:
        """Why `sample` returned None: the limit of turns, tokens or time, or an abort. None before that."""
        return self._conversation.stop_reason

    def add(self, *messages: Message) -> None:
        """Add what the policy reads before it speaks again; ``inline`` messages continue its own turn.

        Raises:
            TypeError: not a `Message`.
        """
        for message in messages:
            if not isinstance(message, Message):
                raise TypeError(f"a chat takes agentrl.Message, not {message!r:.100}")
        self._new += messages

    def branch(self, messages: Sequence[Message] | None = None, *, tools: Sequence[Tool] | None = None) -> Chat:
        """Begin another conversation of the same rollout: a subagent, a second try, a request for a summary.

        Its rows belong to this chat's rollout and share its reward; what both have sampled is trained once. Its turns
        count against the same ``rollout.max_turns``; ``rollout.max_tokens`` holds for each prompt with its answer.

        Args:
            messages: what the policy reads first; without them it goes on from this chat's conversation so far.
            tools: those that the policy is told of; this chat's if None.

        Raises:
            RuntimeError: the chat is sampling, and so its conversation is not known.
        """
        if messages is None and self._sampling:
            raise RuntimeError("this chat is sampling; branch it before or after, or give chat.branch(messages)")
        tools = None if tools is None else self._agent.offered(tools)
        if messages is None and tools is not None and tuple(tools) != tuple(self.tools):
            messages = self.messages  # every prompt lists the tools, so the conversation is rendered anew
        chat = Chat(self._agent, self._conversation.branch(tools), self._new if messages is None else messages)
        if messages is None:
            chat._said, chat._begun, chat._anew = self._said, self._begun, self._anew
        else:
            chat._anew = ForkReason.BRANCH
        self.branches.append(chat)
        return chat

    def rewrite(self, messages: Sequence[Message]) -> None:
        """Go on from other messages, such as a summary: they replace the conversation and what was added to it.

        What was sampled stays in the rollout. After a summary `sample` goes on where ``rollout.max_tokens`` had ended it.

        Raises:
            RuntimeError: the chat is sampling.
            TypeError: not a `Message`.
            ValueError: there is none.
        """
        if self._sampling:
            raise RuntimeError("this chat is sampling; rewrite it before or after")
        if not messages:
            raise ValueError("chat.rewrite needs the messages to go on from")
        old, self._new = self._new, []
        try:
            self.add(*messages)
        except TypeError:
            self._new = old
            raise
        if self._said is not None:
            self._conversation.record(self._said, self._new)
        self._said = None
        if self._begun and self._anew is None:
            self._anew = ForkReason.CONTEXT
        if self.stop_reason is StopReason.MAX_TOKENS:
            self._conversation.stop_reason = None

    def all_chats(self) -> Iterator[Chat]:
        """Iterate over this chat and all branches of it and of them."""
        yield self
        for branch in self.branches:
            yield from branch.all_chats()

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
            raise RuntimeError(
                "this chat is sampling already; sample side by side with chat.branch(...) or agent.chat(...)"
            )
        self._sampling = True
        try:
            return await self._sample(stop)
        finally:
            self._sampling = False

    async def _sample(self, stop: Sequence[str]) -> Message | None:
        conversation, deadline = self._conversation, self._agent.deadline
        if conversation.stop_reason is None and asyncio.get_running_loop().time() >= deadline:
            conversation.stop_reason = StopReason.MAX_TIME
        if conversation.stop_reason is not None:
            return None
        self._take_turn()
        clock = asyncio.timeout_at(deadline)
        try:
            async with clock:
                self._said = await conversation.sample(stop)
        except TimeoutError:
            if not clock.expired():
                raise
            conversation.stop_reason = StopReason.MAX_TIME
        return self._said

    def _take_turn(self) -> None:
        """Prepare the prompt of the next turn from what was added."""
        if not self._new and not self._begun:
            raise ValueError("a chat needs a message before the policy can speak: agent.chat([Message('user', …)])")
        if not self._new and self._conversation.ended_its_turn:
            raise ValueError("the policy has ended its turn: chat.add(Message('user', …)) before it speaks again")
        said, new = self._said, tuple(self._new)
        if self._anew is not None:
            self._conversation.rewrite(new, self._anew)
        elif said is not None:
            self._conversation.answer(said, new)
        else:
            assert not self._begun, "a turn that was not sampled has a stop reason"
            self._conversation.begin(new, self._agent.task.id)
        self._begun, self._said, self._anew = True, None, None
        self._new.clear()

    def rollout(
        self,
        reward: float = 0.0,
        *,
        metrics: Mapping[str, float] | None = None,
        stop_reason: StopReason | None = None,
    ) -> Rollout:
        """Return the conversation, its branches within, as a rollout.

        Args:
            reward: of all of it; a reward function (``reward.function``) replaces it.
            metrics: figures to average over rollouts and log.
            stop_reason: why it is over; by default the limit that ended it, else ``TERMINATED``.

        Raises:
            ValueError: the reward or a figure is no finite number, or this is a branch.
        """
        if self._conversation.state.trajectory.branch_name:
            raise ValueError(
                "a branch has no rollout of its own: call rollout() on the chat that agent.chat(...) returned"
            )
        figures = {"reward": float(reward), **{name: float(value) for name, value in (metrics or {}).items()}}
        for name, value in figures.items():
            if not math.isfinite(value):
                raise ValueError(f"chat.rollout: {name} is {value}; it must be a finite number")
        self._last_turns()
        state = self._conversation.state
        state.reward = figures["reward"]
        state.metrics = {name: figures[name] for name in metrics or {}}
        if state.turns:
            state.turns[-1].reward = state.reward
        reason = stop_reason or self.stop_reason or StopReason.TERMINATED
        rollout = as_rollout(self._agent.task, state, reason, self._agent.seconds, self._agent.tools.seconds)
        rollout.dropped = any(chat.stop_reason is StopReason.ABORTED for chat in self.all_chats())
        return rollout

    def cut(self, reason: StopReason, failure: Failure | None) -> Rollout:
        """Return the conversation as the rollout of an episode that did not come to its end."""
        self._last_turns()
        reason = self.stop_reason or reason if failure is None else reason
        return as_rollout(
            self._agent.task, self._conversation.state, reason, self._agent.seconds, self._agent.tools.seconds, failure
        )

    def _last_turns(self) -> None:
        for chat in self.all_chats():
            if chat._said is not None:
                chat._conversation.answer(chat._said, chat._new, over=True)
                chat._said = None
                chat._new.clear()

    async def close(self) -> None:
        """Say that no further turn comes, of its branches neither: they are of the same session."""
        await self._conversation.close()
