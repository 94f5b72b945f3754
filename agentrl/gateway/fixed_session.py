"""Agents of a program that another model or a scripted player plays: no token of theirs is known or trained."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from typing_extensions import override

from agentrl.clients.chat_messages import conversation_to_wire, split_reasoning
from agentrl.core.errors import EnvironmentFailure, EpisodeError
from agentrl.core.lineup import EndpointSeat, ScriptedSeat
from agentrl.core.types import Message, StopReason
from agentrl.core.user_code import user_code
from agentrl.episode.chat import Agent
from agentrl.episode.multi_agent_episode import load_player
from agentrl.gateway.agent_session import LIMITS, EpisodeProgress, Session
from agentrl.gateway.dialects.base import BadRequestError, ChatRequest, Reply


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
        if request.tools:
            raise BadRequestError(f"tools: this agent is played by {self._seat.name}, which calls none")
        reply = self._new_reply(request)
        if reply.turn >= self.agent.context.limits.max_turns:
            self.stop_reason = StopReason.MAX_TURNS
            return replace(reply, text=LIMITS[StopReason.MAX_TURNS])
        step = self.progress.next_step()
        try:
            text = await self._act(request)
        except EpisodeError as error:
            raise self._fail(error) from error
        self._steps.append((step, text))
        stop = min((stop for stop in request.stop if stop in text), key=text.index, default=None)
        if stop is None:
            return replace(reply, text=text)
        return replace(reply, text=text[: text.index(stop)], finish="stop_sequence", stop=stop)

    async def _act(self, request: ChatRequest) -> str:
        """Return the text of the turn.

        Raises:
            EpisodeError: the endpoint failed, or the player's code.
        """
        if isinstance(self._seat, EndpointSeat):
            with self.agent.clock.pause():
                params = replace(self._seat.sampling, stop=request.stop, seed=self.agent.state.seed)
                reply = await self._seat.endpoint.reply(conversation_to_wire(request.messages), (), params)
                return split_reasoning(reply.message.content)[1]
        messages = _new_messages(request.messages)
        async with self._lock:
            return await asyncio.get_running_loop().run_in_executor(
                self.agent.context.pool, lambda: self._act_scripted(messages)
            )

    def _act_scripted(self, messages: tuple[Message, ...]) -> str:
        with user_code(lambda error: self.agent.context.author_failure(f"the player {self._seat.name}", error)):
            text = self._player.act(messages, ())
        if not isinstance(text, str):
            raise EnvironmentFailure(f"the player {self._seat.name} must return a text, it returned {text!r:.100}")
        return text


def _new_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages after the last one of the assistant."""
    start = max((index + 1 for index, message in enumerate(messages) if message.role == "assistant"), default=0)
    return tuple(messages[start:])
