"""Agents of a program that another model or a scripted player plays: none of their tokens is known or trained."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from typing_extensions import override

from agentrl.clients.chat_messages import conversation_to_wire, split_reasoning
from agentrl.core.errors import EnvironmentFailure, EpisodeError
from agentrl.core.lineup import EndpointSeat, ScriptedSeat
from agentrl.core.types import FinishReason, Message, StopReason
from agentrl.core.user_code import user_code
from agentrl.episode.chat import Agent
from agentrl.episode.multi_agent_episode import load_player
from agentrl.gateway.agent_session import LIMITS, EpisodeProgress, Session
from agentrl.gateway.dialects.base import BadRequestError, ChatRequest, Finish, Reply
from agentrl.gateway.joining import shown_calls


class FixedSession(Session):
    """An agent that does not learn.

    Args:
        agent: of the episode.
        model: the agent's name for programs.
        progress: of the episode.
        seat: who plays.
        number: of the seat, from 0.
    """

    def __init__(
        self, agent: Agent, model: str, progress: EpisodeProgress, seat: EndpointSeat | ScriptedSeat, number: int
    ) -> None:
        super().__init__(agent, model, progress)
        self._seat = seat
        self._steps: list[tuple[int, str]] = []
        self._lock = asyncio.Lock()
        if isinstance(seat, ScriptedSeat):
            rng = np.random.default_rng([agent.state.seed, number])
            self._player = load_player(seat.player)(rng)

    @property
    @override
    def has_turns(self) -> bool:
        return bool(self._steps)

    @property
    @override
    def turn_steps(self) -> list[int]:
        return [step for step, _ in self._steps]

    @property
    @override
    def moves(self) -> list[str]:
        return [text for _, text in self._steps]

    @override
    def last_turn(self) -> tuple[int, str] | None:
        return self._steps[-1] if self._steps else None

    @override
    async def _answer(self, request: ChatRequest) -> Reply:
        self._check_open()
        if request.tools and isinstance(self._seat, ScriptedSeat):
            raise BadRequestError(f"tools: this agent is played by {self._seat.name}, which calls none")
        reply = self._new_reply(request)
        if reply.turn >= self.agent.context.limits.max_turns:
            self.stop_reason = StopReason.MAX_TURNS
            return replace(reply, text=LIMITS[StopReason.MAX_TURNS])
        step = self.progress.next_step()
        try:
            if isinstance(self._seat, EndpointSeat):
                reply = await self._request(self._seat, request, reply)
            else:
                reply = replace(reply, text=await self._act(self._seat, request))
        except EpisodeError as error:
            raise self._fail(error) from error
        self._steps.append((step, reply.text))
        stop = min((stop for stop in request.stop if stop in reply.text), key=reply.text.index, default=None)
        if stop is None:
            return reply
        return replace(reply, text=reply.text[: reply.text.index(stop)], finish="stop_sequence", stop=stop)

    async def _request(self, seat: EndpointSeat, request: ChatRequest, reply: Reply) -> Reply:
        """Return a reply with the turn of the model at the endpoint.

        Raises:
            SamplerError: the endpoint failed.
        """
        params = replace(seat.sampling, stop=request.stop, seed=self.agent.state.seed)
        with self.agent.clock.pause():
            turn = await seat.endpoint.reply(conversation_to_wire(request.messages), request.tools, params)
        calls = shown_calls(turn.message.tool_calls, reply.turn)
        finish: Finish = "length" if turn.finish_reason is FinishReason.LENGTH else "stop"
        return replace(
            reply,
            text=split_reasoning(turn.message.content)[1],
            calls=calls,
            finish="tool_calls" if calls else finish,
            prompt_tokens=turn.usage.prompt_tokens,
            completion_tokens=turn.usage.completion_tokens,
            cached_tokens=turn.usage.cached_tokens,
        )

    async def _act(self, seat: ScriptedSeat, request: ChatRequest) -> str:
        """Return the text of the player's turn.

        Raises:
            EnvironmentFailure: the player's code failed.
        """
        messages = _new_messages(request.messages)

        def act() -> str:
            with user_code(lambda error: self.agent.context.author_failure(f"the player {seat.name}", error)):
                text = self._player.act(messages, ())
            if not isinstance(text, str):
                raise EnvironmentFailure(f"the player {seat.name} must return a text, it returned {text!r:.100}")
            return text

        async with self._lock:
            return await asyncio.get_running_loop().run_in_executor(self.agent.context.pool, act)


def _new_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages after the last one of the assistant."""
    start = max((index + 1 for index, message in enumerate(messages) if message.role == "assistant"), default=0)
    return tuple(messages[start:])
