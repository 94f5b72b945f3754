"""API of generate functions: chats with the policy, recorded token by token, and tool calls."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium.utils import seeding

from agentrl.core.lineup import MAIN, Lineup, PolicySeat
from agentrl.core.task import Task
from agentrl.core.tool import Tool
from agentrl.core.types import (
    Failure,
    ForkReason,
    MaskReason,
    Message,
    Rollout,
    SamplingParams,
    StopReason,
    ToolCall,
    ToolResult,
)
from agentrl.episode.context import EpisodeContext
from agentrl.episode.conversation import BaseConversation
from agentrl.episode.endpoint_conversation import open_conversation
from agentrl.episode.limits import EpisodeClock
from agentrl.episode.state import EpisodeState, TurnEnd
from agentrl.episode.tool_calls import ToolRunner
from agentrl.obs.waiting import TURN, waiting

_GRACE = 0.1
"""Share of ``rollout.max_seconds`` that a function may take after the time limit, to compute its reward."""


class Agent:
    """The policy and its tools in one episode; argument of the function that ``rollout.generate`` names.

    Example::

        async def generate(task, agent):
            chat = agent.chat(task.prompt)
            while (reply := await chat.sample(stop=("</search>",))) is not None:
                if "<search>" not in reply.content:
                    break
                found = await agent.call("search", {"query": reply.content})
                chat.add(Message("user", found.content, inline=True))
            return chat.rollout(reward=float(task.answer in reply.content if reply else False))
    """

    def __init__(
        self, context: EpisodeContext, task: Task, state: EpisodeState, lineup: Lineup | None = None, name: str = MAIN
    ) -> None:
        """Begin an attempt at an episode; called by the runner, and by `join`."""
        self.task = task
        """The problem."""
        self.seed = state.env_seed
        """Seed that an environment would be reset with; equal for all episodes of a task (``rollout.reset_seed``)."""
        self.rng: np.random.Generator = seeding.np_random(self.seed)[0]
        """Generator with this seed, like ``Env.np_random``: all randomness of an episode should come from here."""
        self.chats: list[Chat] = []
        """All chats of the episode, in the order in which they were begun."""
        self.lineup = lineup
        """Who plays, in an episode of several agents."""
        self.several_rollouts: Callable[[Failure | None], list[Rollout]] | None = None
        """In an episode of several agents, returns their rollouts; the argument is what ended the episode."""
        self.context = context
        """Sampler, renderer and limits of this agent."""
        self.state = state
        """Record of the first chat; it has the id and seeds of the rollout before there is a chat, too."""
        self._name = name
        self._members: list[Agent] = []
        self.tools = ToolRunner(context.tool_clients, task, self.state.episode_id, context.served)
        """Runs the tool calls. Its sessions stay open after the attempt, for grading."""
        self._calls: Counter[str] = Counter()
        self._began = time.monotonic()
        limit = context.limits.max_seconds
        self.clock = self.tools.clock = EpisodeClock(limit, grace=_GRACE * limit)
        """The time limit of the attempt."""

    def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Chat:
        """Begin a conversation; each becomes a separate rollout.

        Args:
            messages: the first prompt.
            tools: ``@tool`` coroutines that are listed in the prompt; calls to them are in the message that `Chat.sample`
                returns.
        """
        first, number = self.state, len(self.chats)
        name = f"{first.rollout_id}.{number}"
        state = EpisodeState(name, first.seed, first.attempt, first.reset_seed) if number else first
        chat = Chat(self, open_conversation(self.context, state, self.context.resolve_tools(tools)), messages)
        self.chats.append(chat)
        return chat

    def join(self, name: str, seat: PolicySeat) -> Agent:
        """Return the policy as one of several agents of this episode; its first chat is the agent's rollout.

        It has its own conversation, tokens and limits of turns; task, tools and clock are the episode's.

        Args:
            name: of the agent.
            seat: the policy that plays it.
        """
        context = replace(self.context, policy=seat.policy)
        if seat.sampler is not None:  # whose tokens are not trained
            sampling = replace(context.sampling, experts_from=None, support=None)
            context = replace(context, sampler=seat.sampler, sampling=sampling)
        first = self.state
        state = EpisodeState(f"{first.rollout_id}.{name}", first.seed, first.attempt, first.reset_seed)
        member = Agent(context, self.task, state, self.lineup, name)
        member.tools, member.clock, member._began = self.tools, self.clock, self._began
        self._members.append(member)
        return member

    async def call(self, name: str, arguments: Mapping[str, Any] | None = None) -> ToolResult:
        """Run a tool of one of the chats, or a registered one. A failure of the tool itself is a result with a status.

        Raises:
            ToolFailure, SandboxFailure: the server failed after all retries.
        """
        self._calls[name] += 1
        call = ToolCall(f"{name}-{self._calls[name]}", name, arguments or {})
        tools = tuple(tool for chat in self.chats for branch in chat.all_chats() for tool in branch.tools)
        (result,) = await self.tools.run_environment_calls((call,), tools)
        return result

    def prompt_tokens(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
        """Return the number of tokens of a prompt.

        Raises:
            ConversationError: the chat format refuses the messages.
        """
        assert self.context.renderer is not None, "an endpoint counts tokens itself"
        return len(self.context.renderer.render(messages, tools).token_ids)

    def split_turn(self, end: TurnEnd) -> tuple[str, str]:
        """Return reasoning and text of a sampled turn, without its tool calls; see `Renderer.split_turn`."""
        assert self.context.renderer is not None, "turns of endpoints have no ends with tokens"
        return self.context.renderer.split_turn(end.message, prompt_ids=end.prompt_end)

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of every turn."""
        return self.context.sampling

    def resolve_tools(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """Return ``tools`` as this run offers them to the policy; see `EpisodeContext.resolve_tools`."""
        return self.context.resolve_tools(tools)

    @property
    def rollout_ids(self) -> set[str]:
        """Ids of the rollouts that the attempt can have."""
        members = {member.state.rollout_id for member in self._members}
        return members | {chat.rollout_id for chat in self.chats}

    @property
    def episode_id(self) -> str:
        """Id of this attempt at engines and tool servers."""
        return self.state.episode_id

    @property
    def turns(self) -> int:
        """Turns of the policy in all chats, those in progress included."""
        return sum(chat.turns for chat in self.chats) + sum(member.turns for member in self._members)

    @property
    def seconds(self) -> float:
        """Wall time since the attempt began."""
        return time.monotonic() - self._began

    def set_task(self, task: Task) -> None:
        """Set the task, which the agent has brought: before the first chat."""
        self.task = self.tools.task = task

    def begin_time(self) -> None:
        """Count `seconds` from here: the attempt has waited for an agent, and begins."""
        self._began = time.monotonic()

    def unfinished_rollouts(self, reason: StopReason, failure: Failure | None = None) -> list[Rollout]:
        """Return the rollouts of an attempt that did not finish: one for each chat, or a single empty one."""
        if self.several_rollouts is not None:
            return self.several_rollouts(failure)
        if not self.chats:
            empty = open_conversation(self.context, self.state)
            return [self._as_rollout(empty, reason, failure)]
        return [chat.unfinished_rollout(reason, failure) for chat in self.chats]

    def _as_rollout(
        self, conversation: BaseConversation, reason: StopReason, failure: Failure | None = None
    ) -> Rollout:
        """Return one of the conversations as a rollout, with the times of the whole attempt."""
        return conversation.rollout(
            self.task,
            reason,
            seconds=self.seconds,
            tool_seconds=self.tools.seconds,
            failure=failure,
            agent=self._name,
        )

    async def close(self) -> None:
        """End the sampler's sessions."""
        for member in (self, *self._members):
            for chat in member.chats:
                await chat.close()


class Chat:
    """One conversation with the policy; returned by `Agent.chat`, or by `branch` within the same rollout.

    Sampled tokens are trained on, added messages are only read. Ids, log-probabilities and masks are recorded during
    sampling, and sampled text is never encoded again. Branches may sample concurrently.
    """

    def __init__(self, agent: Agent, conversation: BaseConversation, messages: Sequence[Message]) -> None:
        """Begin with ``messages``; called by `Agent.chat`."""
        self.branches: list[Chat] = []
        """Chats that `branch` returned, in order."""
        self.mask_reason = MaskReason.NONE
        """Why what this chat samples is not trained (`mask`); ``NONE`` if it is."""
        self._agent = agent
        self._conversation = conversation
        self._reply: Message | None = None  # the policy's last message, until it is recorded
        self._new: list[Message] = []  # added since
        self._begun = self._sampling = False
        self._fresh: ForkReason | None = None  # why the next prompt consists of the new messages alone
        self.add(*messages)

    @property
    def rollout_id(self) -> str:
        """Id of the rollout of this chat and its branches."""
        return self._conversation.state.rollout_id

    @property
    def turns(self) -> int:
        """Turns of the policy in this chat and its branches, those in progress included."""
        return self._conversation.state.counters.turns

    @property
    def tools(self) -> Sequence[Tool]:
        """Tools that are listed in the prompt."""
        return self._conversation.tools

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far."""
        earlier = () if self._fresh else tuple(self._conversation.state.messages)
        reply = () if self._reply is None else (self._reply,)
        return (*earlier, *reply, *self._new)

    @property
    def last_turn(self) -> TurnEnd | None:
        """The end of the turn that was sampled last, for `branch`."""
        return self._conversation.last_turn

    @property
    def stop_reason(self) -> StopReason | None:
        """Why `sample` returned None: the limit on turns, tokens or time, or an abort. None before that."""
        return self._conversation.stop_reason

    def add(self, *messages: Message) -> None:
        """Add messages that the policy reads before its next turn; ``inline`` messages continue its last turn.

        Raises:
            TypeError: not a `Message`.
        """
        for message in messages:
            if not isinstance(message, Message):
                raise TypeError(f"a chat takes agentrl.Message, not {message!r:.100}")
        self._new += messages

    def mask(self, reason: MaskReason) -> None:
        """Do not train on what this chat samples; its branches are not affected."""
        self.mask_reason = self._conversation.state.trajectory.mask_reason = reason

    def branch(
        self,
        messages: Sequence[Message] | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        end: TurnEnd | None = None,
        fork: ForkReason = ForkReason.BRANCH,
    ) -> Chat:
        """Begin another conversation of the same rollout: a subagent, a second try, a request for a summary.

        Its rows belong to this chat's rollout and share its reward; shared sampled tokens are trained once. Its turns
        count against the same ``rollout.max_turns``; ``rollout.max_tokens`` applies to each prompt with its answer.

        Args:
            messages: the first prompt; None continues this chat's conversation.
            tools: tools that are listed in the prompt; this chat's if None.
            end: of a turn of this chat (`last_turn`), after which it continues with the same tools; the chat may be sampling.
            fork: the reason of its rows.

        Raises:
            RuntimeError: the chat is sampling, so its conversation is not complete.
        """
        if end is not None:
            chat = Chat(self._agent, self._conversation.branch(end=end, fork=fork), ())
            chat._reply, chat._begun = end.message, True
            self.branches.append(chat)
            return chat
        if messages is None and self._sampling:
            raise RuntimeError("this chat is sampling; branch it before or after, or give chat.branch(messages)")
        tools = None if tools is None else self._agent.resolve_tools(tools)
        if messages is None and tools is not None and tuple(tools) != tuple(self.tools):
            messages = self.messages  # every prompt lists the tools, so the conversation is rendered again
        conversation = self._conversation.branch(tools, fork=fork)
        chat = Chat(self._agent, conversation, self._new if messages is None else messages)
        if messages is None:
            chat._reply, chat._begun, chat._fresh = self._reply, self._begun, self._fresh
        else:
            chat._fresh = fork
            if conversation.stop_reason is StopReason.MAX_TOKENS:
                conversation.stop_reason = None
        self.branches.append(chat)
        return chat

    def rewrite(self, messages: Sequence[Message]) -> None:
        """Continue from other messages, such as a summary: they replace the conversation and the messages added to it.

        Sampled tokens stay in the rollout. After a summary `sample` works again even if ``rollout.max_tokens`` had ended
        the conversation.

        Raises:
            RuntimeError: the chat is sampling.
            TypeError: not a `Message`.
            ValueError: ``messages`` is empty.
        """
        if self._sampling:
            raise RuntimeError("this chat is sampling; rewrite it before or after")
        if not messages:
            raise ValueError("chat.rewrite needs the messages to continue from")
        old, self._new = self._new, []
        try:
            self.add(*messages)
        except TypeError:
            self._new = old
            raise
        if self._reply is not None:
            self._conversation.record(self._reply, self._new)
        self._reply = None
        if self._begun and self._fresh is None:
            self._fresh = ForkReason.CONTEXT
        if self.stop_reason is StopReason.MAX_TOKENS:
            self._conversation.stop_reason = None

    def all_chats(self) -> Iterator[Chat]:
        """Iterate over this chat and all its branches, recursively."""
        yield self
        for branch in self.branches:
            yield from branch.all_chats()

    async def sample(self, *, stop: Sequence[str] = (), max_new_tokens: int | None = None) -> Message | None:
        """Sample a turn up to one of the ``stop`` strings or an end token, and return the policy's message.

        It has at most ``max_new_tokens``, and ``sampler.max_new_tokens``.

        Returns None once ``rollout.max_turns``, ``rollout.max_tokens`` or ``rollout.max_seconds`` is reached;
        `stop_reason` then names the limit. The time in which engines sample does not count.

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
            return await self._sample(stop, max_new_tokens)
        finally:
            self._sampling = False

    async def _sample(self, stop: Sequence[str], max_new_tokens: int | None) -> Message | None:
        conversation, clock = self._conversation, self._agent.clock
        if conversation.stop_reason is None and clock.seconds_left <= 0:
            conversation.stop_reason = StopReason.MAX_TIME
        if conversation.stop_reason is not None:
            return None
        self._prepare_turn()
        with clock.pause(), waiting(TURN, str(self.turns + 1)):
            self._reply = await conversation.sample(stop, max_new_tokens)
        return self._reply

    def _prepare_turn(self) -> None:
        """Prepare the prompt of the next turn from the added messages."""
        if not self._new and not self._begun:
            raise ValueError("a chat needs a message before it can be sampled: agent.chat([Message('user', …)])")
        if not self._new and self._conversation.turn_ended:
            raise ValueError("the policy has ended its turn: chat.add(Message('user', …)) before the next sample")
        reply, new = self._reply, tuple(self._new)
        if self._fresh is not None:
            self._conversation.rewrite(new, self._fresh)
        elif reply is not None:
            self._conversation.answer(reply, new)
        else:
            assert not self._begun, "a turn that was not sampled has a stop reason"
            self._conversation.begin(new, self._agent.task.id)
        self._begun, self._reply, self._fresh = True, None, None
        self._new.clear()

    def rollout(
        self, reward: float = 0.0, *, metrics: Mapping[str, float] | None = None, stop_reason: StopReason | None = None
    ) -> Rollout:
        """Return the conversation and its branches as a rollout.

        Args:
            reward: of the whole rollout; a reward function (``reward.function``) replaces it.
            metrics: values to average over rollouts and log.
            stop_reason: why it ended; by default the limit that ended it, else ``TERMINATED``.

        Raises:
            ValueError: the reward or a metric is not a finite number, or this is a branch.
        """
        if self._conversation.state.trajectory.branch_name:
            raise ValueError(
                "a branch is part of its chat's rollout: call rollout() on the chat that agent.chat(...) returned"
            )
        values = {"reward": float(reward), **{name: float(value) for name, value in (metrics or {}).items()}}
        for name, value in values.items():
            if not math.isfinite(value):
                raise ValueError(f"chat.rollout: {name} is {value}; it must be a finite number")
        self._record_last_turns()
        state = self._conversation.state
        state.reward = values["reward"]
        state.metrics = {name: values[name] for name in metrics or {}}
        if state.turns:
            state.turns[-1].reward = state.reward
        reason = stop_reason or self.stop_reason or StopReason.TERMINATED
        rollout = self._agent._as_rollout(self._conversation, reason)
        rollout.dropped = any(chat.stop_reason is StopReason.ABORTED for chat in self.all_chats())
        return rollout

    def unfinished_rollout(self, reason: StopReason, failure: Failure | None) -> Rollout:
        """Return the conversation as the rollout of an episode that did not finish."""
        self._record_last_turns()
        reason = self.stop_reason or reason if failure is None else reason
        return self._agent._as_rollout(self._conversation, reason, failure)

    def _record_last_turns(self) -> None:
        for chat in self.all_chats():
            if chat._reply is not None:
                chat._conversation.answer(chat._reply, chat._new, over=True)
                chat._reply = None
                chat._new.clear()

    async def close(self) -> None:
        """End the session at the sampler; branches share it."""
        await self._conversation.close()
