"""A conversation with a model at an endpoint, messages in and messages out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from typing_extensions import override

from agentrl.clients.chat_messages import conversation_to_wire, message_to_wire, tool_to_wire
from agentrl.core.task import Task
from agentrl.core.tool import Tool, validate_call
from agentrl.core.types import (
    EndpointRecord,
    Failure,
    FinishReason,
    ForkReason,
    Message,
    Rollout,
    SamplingParams,
    StopReason,
)
from agentrl.episode.context import EpisodeContext
from agentrl.episode.conversation import BaseConversation, Conversation
from agentrl.episode.state import EpisodeState, TurnEnd
from agentrl.obs.waiting import waiting


class EndpointConversation(BaseConversation):
    """Requests a policy's turns from an endpoint. The record has no tokens, so it cannot be trained on.

    ``rollout.max_tokens`` limits the tokens of a conversation as the endpoint counts them. Reasoning, calls and their ids are
    sent back as the endpoint wrote them.

    Args:
        context: endpoint and limits.
        state: record of the conversation.
        tools: tools that the policy may call.
    """

    def __init__(self, context: EpisodeContext, state: EpisodeState, tools: Sequence[Tool] = ()) -> None:
        super().__init__(context, state, tools)
        assert context.endpoint is not None, "an engine has another conversation"
        self._endpoint = context.endpoint
        self._wire = list[dict[str, Any]]()  # what the next request sends; as long as the state's messages
        self._reply: dict[str, Any] = {}  # the last turn, until it is in it
        self._tokens = 0  # of the conversation with its last turn
        self._is_branch = False
        self._connection = AsyncExitStack()
        self._connected = False

    @property
    @override
    def turn_ended(self) -> bool:
        return self._finish_reason is FinishReason.STOP

    @override
    def begin(self, messages: Sequence[Message], task_id: str) -> None:
        state = self.state
        self._extend(messages)
        state.prompt = "\n\n".join(f"{message.role}: {message.content}" for message in messages)
        state.first_messages = tuple(messages)

    @override
    def branch(
        self,
        tools: Sequence[Tool] | None = None,
        end: TurnEnd | None = None,
        fork: ForkReason = ForkReason.BRANCH,
    ) -> EndpointConversation:
        assert end is None, "turns of endpoints have no ends with tokens"
        conversation = EndpointConversation(
            self._context, self.state.branch(fork=fork), self.tools if tools is None else tools
        )
        conversation._wire, conversation._reply = list(self._wire), self._reply
        conversation._finish_reason, conversation._tokens = self._finish_reason, self._tokens
        conversation.stop_reason = self.stop_reason
        conversation._is_branch = True
        return conversation

    @override
    def rewrite(self, messages: Sequence[Message], reason: ForkReason = ForkReason.CONTEXT) -> None:
        self.state.messages, self._wire = [], []
        self._extend(messages)
        self._finish_reason, self._tokens = None, 0
        if self.stop_reason is StopReason.MAX_TOKENS:
            self.stop_reason = None

    @override
    async def sample(self, stop: Sequence[str] = (), max_new_tokens: int | None = None) -> Message | None:
        state, limits = self.state, self._context.limits
        room = limits.room(self._tokens)
        goes_on = self._wire[-1]["role"] == "assistant"  # a turn that its limit cut; the API continues none
        if state.counters.turns >= limits.max_turns or room < 1 or goes_on:
            out_of_turns = state.counters.turns >= limits.max_turns
            self.stop_reason = StopReason.MAX_TURNS if out_of_turns else StopReason.MAX_TOKENS
            return None
        if not self._is_branch and not self._connected:
            await self._connection.enter_async_context(self._endpoint.keep_connections())
            self._connected = True
        request_id = f"{state.name}/{len(state.turns)}"
        params = self._params(room if max_new_tokens is None else min(room, max_new_tokens), stop, request_id)
        with self._counted_turn(), waiting("sampling", request_id, self._endpoint.model):
            reply = await self._endpoint.reply(self._wire, self.tools, params)
        state.counters.usage += reply.usage
        self._tokens = reply.usage.prompt_tokens + reply.usage.completion_tokens
        self._finish_reason = reply.finish_reason
        checked = [validate_call(call, self.tools) for call in reply.message.tool_calls] if self.tools else []
        calls = self._with_unique_ids(checked)
        self._reply = dict(reply.wire)
        sent_calls = self._reply.pop("tool_calls", ())
        if calls:
            pairs = zip(sent_calls, calls, strict=True)
            self._reply["tool_calls"] = [{**sent, "id": call.id} for sent, call in pairs]
        else:
            self._reply["content"] = self._reply["content"] or ""
        message = self._unrecorded = replace(reply.message, tool_calls=calls)
        return message

    @override
    def answer(self, action: Message, new: Sequence[Message], *, reward: float = 0.0, over: bool = False) -> None:
        self.record(action, new, reward=reward)
        self.state.messages.append(action)
        self._wire.append(self._reply)
        self._extend(new)

    @override
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
        unanswered = [] if self._unrecorded is None else [self._unrecorded]
        rollout = super().rollout(
            task, reason, seconds=seconds, tool_seconds=tool_seconds, failure=failure, agent=agent
        )
        usage = self.state.counters.usage
        rollout.sampled_tokens = usage.completion_tokens
        rollout.endpoint = EndpointRecord(
            self._endpoint.model,
            tuple(conversation_to_wire([*self.state.messages, *unanswered])),
            tuple(map(tool_to_wire, self.tools)),
            usage.prompt_tokens,
        )
        return rollout

    @override
    async def close(self) -> None:
        await self._connection.aclose()
        self._connected = False

    def _extend(self, messages: Sequence[Message]) -> None:
        """Add messages that the policy reads to the conversation."""
        call_ids = {call.id for message in (*self.state.messages, *messages) for call in message.tool_calls}
        self.state.messages.extend(messages)
        self._wire.extend(message_to_wire(message, call_ids) for message in messages)

    def _params(self, room: int, stop: Sequence[str], request_id: str) -> SamplingParams:
        sampling = self._context.sampling
        return replace(
            sampling,
            max_new_tokens=min(room, sampling.max_new_tokens),
            stop=tuple(dict.fromkeys((*sampling.stop, *stop))),
            seed=self._seed(request_id),
        )


def open_conversation(context: EpisodeContext, state: EpisodeState, tools: Sequence[Tool] = ()) -> BaseConversation:
    """Return the conversation with a policy: at an endpoint if the context has one, else token by token."""
    return (Conversation if context.endpoint is None else EndpointConversation)(context, state, tools)
