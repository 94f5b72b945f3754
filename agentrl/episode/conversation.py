"""Conversations with a policy: what they have in common, and the conversation in token ids."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from typing_extensions import override

from agentrl.core.errors import AgentrlError, TaskError
from agentrl.core.task import Task
from agentrl.core.tool import Tool
from agentrl.core.types import (
    ANSWER,
    Failure,
    FinishReason,
    Fork,
    ForkReason,
    Generation,
    Message,
    Prompt,
    Rollout,
    SamplingParams,
    StopReason,
    ToolCall,
    Turn,
    json_state,
)
from agentrl.episode.context import EpisodeContext
from agentrl.episode.state import PROMPT_END, EpisodeState, TurnEnd
from agentrl.obs.waiting import waiting

_log = logging.getLogger(__name__)
_CHARACTERS_PER_TOKEN = 16
"""More than texts have on average."""


class BaseConversation(ABC):
    """Samples a policy's turns within the episode's limits, and records them.

    Args:
        context: policy and limits.
        state: record of the conversation; changes only here, and only between turns.
        tools: tools that the policy may call; part of every prompt.
    """

    def __init__(self, context: EpisodeContext, state: EpisodeState, tools: Sequence[Tool] = ()) -> None:
        self.state = state
        self.tools = tools
        self.stop_reason: StopReason | None = None
        """Why `sample` returned None; None while further turns are possible."""
        self.last_turn: TurnEnd | None = None
        """End of the last sampled turn, if its tokens are known; None before the first turn and after an aborted turn."""
        self._context = context
        self._finish_reason: FinishReason | None = None  # of the last turn
        self._unrecorded: Message | None = None  # the last turn, until it is in the state's turns

    @property
    @abstractmethod
    def turn_ended(self) -> bool:
        """Whether the policy has ended its last turn: it continues only after another message."""

    @abstractmethod
    def begin(self, messages: Sequence[Message], task_id: str) -> None:
        """Take the first prompt.

        Raises:
            TaskError: it leaves no room for an answer.
        """

    @abstractmethod
    def branch(
        self,
        tools: Sequence[Tool] | None = None,
        end: TurnEnd | None = None,
        fork: ForkReason = ForkReason.BRANCH,
    ) -> BaseConversation:
        """Return another conversation of the same episode; both may be sampled concurrently.

        Args:
            tools: that the policy may call; this conversation's if None.
            end: of a turn of this conversation, after which it continues; None: after the last one.
            fork: the reason of its rows.
        """

    @abstractmethod
    def rewrite(self, messages: Sequence[Message], reason: ForkReason = ForkReason.CONTEXT) -> None:
        """Continue from other messages; rows that begin here are forks for ``reason``.

        A ``stop_reason`` of ``MAX_TOKENS`` is cleared, since the old context no longer counts.
        """

    @abstractmethod
    async def sample(self, stop: Sequence[str] = (), max_new_tokens: int | None = None) -> Message | None:
        """Sample a turn up to one of the ``stop`` strings, its end or a limit, and return it as a message.

        Its tool calls have ids that are unique in the episode; without ``tools`` it has none. Returns None if a limit or an abort
        ends the conversation; ``stop_reason`` is then set.

        Raises:
            SamplerError: the engine or the endpoint failed.
        """

    @abstractmethod
    def answer(self, action: Message, new: Sequence[Message], *, reward: float = 0.0, over: bool = False) -> None:
        """Record the turn ``action`` and its answer, and prepare the next prompt unless the episode is ``over``.

        Args:
            action: the message that `sample` returned.
            new: the messages that answer it.
            reward: of the turn.
            over: whether no further turn follows.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the conversation; the episode is over."""

    def record(self, action: Message, new: Sequence[Message], *, reward: float = 0.0) -> None:
        """Record the turn ``action`` and its answer as text, unless the conversation that this one branched from does."""
        assert self._finish_reason is not None, "sample comes first"
        if self._unrecorded is not None:
            observation = "".join(message.content for message in new)
            self.state.turns.append(Turn(action.content, observation, self._finish_reason, reward))
        self._unrecorded = None

    def rollout(
        self,
        task: Task,
        reason: StopReason,
        *,
        seconds: float,
        tool_seconds: float,
        failure: Failure | None = None,
        agent: str = "main",
    ) -> Rollout:
        """Return the conversation and its branches as a rollout. An aborted one is dropped: its end is arbitrary.

        Args:
            task: the episode's task.
            reason: why the episode ended.
            seconds: wall time of the episode.
            tool_seconds: wall time of its tool calls.
            failure: what ended it, for ``StopReason.FAILED``.
            agent: whose conversation it is.
        """
        state = self.state
        if self._unrecorded is not None:  # its answer was interrupted
            self.record(self._unrecorded, ())
        return Rollout(
            prompt_id=task.id,
            rollout_id=state.rollout_id,
            rows=state.trajectory.rows(task.id, state.rollout_id, agent),
            reward=state.reward,
            stop_reason=reason,
            metrics=state.metrics,
            turns=state.all_turns,
            prompt=state.prompt,
            failure=failure,
            dropped=reason is StopReason.ABORTED,
            seconds=seconds,
            tool_seconds=tool_seconds,
            sampled_tokens=state.trajectory.sampled_tokens,
            metadata=dict(task.metadata) | ({} if state.answer is None else {ANSWER: state.answer}),
            label=json_state(task.answer),
            messages=state.first_messages,
            tools=tuple(self.tools),
            agent=agent,
            images=dict(state.trajectory.images),
        )

    @contextmanager
    def _counted_turn(self) -> Iterator[None]:
        """Count a turn, unless it fails."""
        self.state.counters.turns += 1
        try:
            yield
        except BaseException:
            self.state.counters.turns -= 1
            raise

    def _with_unique_ids(self, calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        """Return calls with ids that are unique in the episode: their own, else the turn's number and their index in it."""
        state, used = self.state, self.state.counters.call_ids
        turn = ".".join(str(number) for number in (*state.trajectory.branch_name, len(state.turns)))
        named: list[ToolCall] = []
        for number, call in enumerate(calls):
            name = call.id if call.id and call.id not in used else f"{turn}.{number}"
            used.add(name)
            named.append(replace(call, id=name))
        return tuple(named)

    def _seed(self, request_id: str) -> int | None:
        """Return the seed of a request: a function of the request alone, the same in every process."""
        run_seed = self._context.sampling.seed
        return None if run_seed is None else _request_seed(run_seed, self.state.seed, request_id)


class Conversation(BaseConversation):
    """Samples a policy's turns within the episode's limits, and records every token with its provenance.

    Sampled tokens are never decoded and encoded again: `answer` appends to them (``Renderer.bridge``). If the chat
    template changes earlier turns, it renders the whole conversation again and the trajectory forks.

    Args:
        context: sampler, renderer and limits.
        state: record of the conversation; changes only here, and only between turns, except for the tokens of an
            unfinished turn.
        tools: tools that the policy may call; part of every prompt.
    """

    def __init__(self, context: EpisodeContext, state: EpisodeState, tools: Sequence[Tool] = ()) -> None:
        super().__init__(context, state, tools)
        assert context.renderer is not None, "an endpoint has another conversation"
        assert context.sampler is not None, "an endpoint has another conversation"
        self._renderer, self._sampler = context.renderer, context.sampler
        self._generation: Generation | None = None  # of the last turn
        self._end_tokens = {(token,) for token in self._renderer.end_token_ids}

    @property
    @override
    def turn_ended(self) -> bool:
        """Whether the last sampled token is an end token: the policy continues only after another message."""
        return self._generation is not None and self._generation.token_ids[-1:] in self._end_tokens

    @override
    def begin(self, messages: Sequence[Message], task_id: str) -> None:
        """Render the first prompt.

        Raises:
            TaskError: it leaves no room for an answer.
        """
        state, limits = self.state, self._context.limits
        prompt = self._renderer.render(messages, self.tools)
        if limits.room(len(prompt.token_ids)) < 1:
            raise TaskError(
                f"task {task_id!r}: its prompt of {len(prompt.token_ids)} tokens leaves no room to answer within "
                f"rollout.max_tokens={limits.max_tokens}"
            )
        state.messages.extend(messages)
        state.prompt_ids, state.images, state.added = prompt.token_ids, prompt.images, None
        state.prompt = self._renderer.decode(prompt.token_ids)
        state.first_messages = tuple(messages)

    @override
    def branch(
        self,
        tools: Sequence[Tool] | None = None,
        end: TurnEnd | None = None,
        fork: ForkReason = ForkReason.BRANCH,
    ) -> Conversation:
        state = self.state.branch(end, fork)
        conversation = Conversation(self._context, state, self.tools if tools is None else tools)
        generation = conversation._generation = self._generation if end is None else end.generation
        conversation._finish_reason = None if generation is None else generation.finish_reason
        conversation.stop_reason = self.stop_reason if end is None else None
        return conversation

    @override
    def rewrite(self, messages: Sequence[Message], reason: ForkReason = ForkReason.CONTEXT) -> None:
        """Continue from other messages, rendered from scratch; rows that begin here are forks for ``reason``.

        A ``stop_reason`` of ``MAX_TOKENS`` is cleared, since the old context no longer counts.
        """
        state = self.state
        prompt = self._renderer.render(self._cut_to_fit(messages), self.tools)
        state.messages = list(messages)
        state.prompt_ids, state.images, state.added, state.fork = prompt.token_ids, prompt.images, None, reason
        self._generation = self._finish_reason = None
        if self.stop_reason is StopReason.MAX_TOKENS:
            self.stop_reason = None

    @override
    async def sample(self, stop: Sequence[str] = (), max_new_tokens: int | None = None) -> Message | None:
        """Sample a turn up to one of the ``stop`` strings, an end token or a limit, and return it as a message.

        Its tool calls have ids that are unique in the episode; without ``tools`` it has none. It is ``inline`` if it continues
        with the policy's last message, which was cut. Returns None if a limit or an abort ends the conversation;
        ``stop_reason`` is then set.

        Raises:
            SamplerError: the engine failed, or returned an inconsistent generation.
        """
        state, context = self.state, self._context
        room = context.limits.room(len(state.prompt_ids))
        self.last_turn = None
        if state.counters.turns >= context.limits.max_turns or room < 1:
            out_of_turns = state.counters.turns >= context.limits.max_turns
            self.stop_reason = StopReason.MAX_TURNS if out_of_turns else StopReason.MAX_TOKENS
            return None
        goes_on = state.added == 0 and state.messages[-1].role == "assistant"  # nothing was said since the last turn
        state.trajectory.extend_to(state.prompt_ids, images=state.images, added=state.added, fork=state.fork)
        state.trajectory.temperature = context.sampling.temperature
        state.added, state.fork = 0, None
        request_id = f"{state.name}/{len(state.turns)}"
        with self._counted_turn(), waiting("sampling", request_id):
            try:
                generation = await self._sampler.generate(
                    Prompt(state.prompt_ids, state.images),
                    self._sampling_params(
                        room if max_new_tokens is None else min(room, max_new_tokens), stop, request_id
                    ),
                    session_id=state.episode_id,
                    request_id=request_id,
                    policy=context.policy,
                )
            except asyncio.CancelledError:
                await self._abort(request_id)
                raise
        state.trajectory.append_sampled(generation)
        if generation.finish_reason is FinishReason.ABORT:
            self.stop_reason = StopReason.ABORTED
            return None
        self._generation, self._finish_reason = generation, generation.finish_reason
        message = self._renderer.parse(generation.token_ids, self.tools, prompt_ids=state.prompt_ids)
        calls = self._with_unique_ids(message.tool_calls) if self.tools else ()
        message = self._unrecorded = replace(message, tool_calls=calls, inline=goes_on)
        sampled = replace(generation, logprobs=(), experts=None, support=None)
        prompt_ids, messages = state.prompt_ids, state.messages
        end = prompt_ids[-PROMPT_END:]
        self.last_turn = TurnEnd(message, sampled, len(prompt_ids), end, state.trajectory.tip, messages, len(messages))
        return message

    @override
    def answer(self, action: Message, new: Sequence[Message], *, reward: float = 0.0, over: bool = False) -> None:
        self.record(action, new, reward=reward)
        assert self._generation is not None, "record checks it"
        state, renderer = self.state, self._renderer
        generation, new = self._generation, tuple(new)
        state.messages.extend((action, *new))
        if over:
            return
        history, new = state.messages[: len(state.messages) - len(new)], self._cut_to_fit(new)
        added = renderer.bridge(history, generation.token_ids, new, self.tools)
        if isinstance(added, Fork):
            prompt = renderer.render((*history, *new), self.tools)
            state.prompt_ids, state.images, state.added = prompt.token_ids, prompt.images, None
            state.fork = added.reason
        else:
            earlier_tokens = len(state.prompt_ids) + len(generation.token_ids)
            state.images += tuple(placed.shift(earlier_tokens) for placed in added.images)
            # The short tuples are joined first: each joining copies everything that it joins.
            state.prompt_ids += generation.token_ids + added.token_ids
            state.added = len(added.token_ids)

    @override
    async def close(self) -> None:
        """End the session at the sampler. A failure is only logged: the episode is over."""
        try:
            await self._sampler.close_session(self.state.episode_id)
        except AgentrlError as error:
            _log.warning("session %s was not closed: %s", self.state.episode_id, error)

    def _cut_to_fit(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages; each text that would fill the context alone is cut after that length.

        No turn follows such a prompt, and to encode the output of a tool of 50 MB would stop all episodes for a minute.
        """
        limit = self._context.limits.max_tokens

        def cut(message: Message) -> Message:
            text = message.content[: _CHARACTERS_PER_TOKEN * limit]
            if message.images or len(message.content) < 2 * len(text):
                return message
            fits = len(self._renderer.render((Message("user", text),)).token_ids) <= limit
            return message if fits else replace(message, content=text)

        return tuple(map(cut, messages))

    def _sampling_params(self, room: int, stop: Sequence[str], request_id: str) -> SamplingParams:
        sampling, end_tokens = self._context.sampling, self._renderer.end_token_ids
        experts_from = None if sampling.experts_from is None else self.state.trajectory.routed_tokens
        return replace(
            sampling,
            experts_from=experts_from,
            max_new_tokens=min(room, sampling.max_new_tokens),
            stop=tuple(dict.fromkeys((*sampling.stop, *stop))),
            stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *end_tokens))),
            seed=self._seed(request_id),
        )

    async def _abort(self, request_id: str) -> None:
        try:
            await self._sampler.abort(request_id)
        except AgentrlError as error:
            _log.warning("request %s was not aborted: %s", request_id, error)


def _request_seed(run_seed: int, episode_seed: int, request_id: str) -> int:
    text = f"{run_seed}/{episode_seed}/{request_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") >> 1
