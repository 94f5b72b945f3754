"""The requests of an agent about its episode, besides those for turns: reward, end, and the turns of a seat."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from agentrl.gateway.agent_sessions import AgentEnd, AgentSessions
from agentrl.gateway.dialects.base import BadRequestError, convert
from agentrl.gateway.http_messages import check_numbers, json_reply, named_agent, read_body, read_object
from agentrl.gateway.seat_turns import SeatTurns

Handler = Callable[[Request, AgentSessions], Awaitable[Response]]

END_PATH = "/v1/session/end"
END_BYTES = 2**20
"""Bytes of the largest end of a session: its result is recorded with the rollout."""
MAX_WAIT_S = 60.0
"""Most seconds that a request waits, for an episode or for an observation."""


class _EndBody(msgspec.Struct):
    """``POST /v1/session/end``."""

    reward: float | None = None
    metrics: dict[str, float] = {}
    failure: str = ""
    answer: str | None = None
    result: Any = None


class _RewardBody(msgspec.Struct):
    """``POST /v1/session/reward``."""

    reward: float
    agent: str | None = None
    metrics: dict[str, float] = {}


class _ObserveBody(msgspec.Struct):
    """``POST /v1/session/observe``."""

    wait_s: float = 30.0


class _MoveBody(msgspec.Struct):
    """``POST /v1/session/move``."""

    turn: int
    text: str


async def set_reward(http: Request, sessions: AgentSessions) -> Response:
    """Set the reward of a rollout, and metrics."""
    if not sessions.may_reward:
        raise BadRequestError("the program does not set the reward: rollout.agent.reward=session allows it", 403)
    body = convert(read_object(await read_body(http)), _RewardBody)
    check_numbers({"reward": body.reward, **body.metrics})
    agent = named_agent(http) if body.agent is None else body.agent
    sessions.set_reward(agent, body.reward, body.metrics)
    return json_reply({"reward": body.reward} if agent is None else {"reward": body.reward, "agent": agent})


async def end_session(http: Request, sessions: AgentSessions) -> Response:
    """End an episode, once; what a repeated end has is not used."""
    if not sessions.may_end:
        raise BadRequestError("the program's own end is that of its session", 403)
    content = await read_body(http)
    if len(content) > END_BYTES:
        raise BadRequestError(f"the end of a session may have {END_BYTES} bytes", 413)
    body = convert(read_object(content or b"{}"), _EndBody)
    if not sessions.ended.done():
        check_numbers({"reward": body.reward or 0.0, **body.metrics})
        if body.reward is not None and not sessions.may_reward:
            raise BadRequestError("the agent does not set the reward: rollout.agent.reward=session allows it", 403)
        if sessions.needs_reward and body.reward is None and sessions.unrewarded and not body.failure:
            names = f" of {', '.join(sessions.unrewarded)}" if all(sessions.unrewarded) else ""
            raise BadRequestError(
                f'rollout.agent.reward=session, and no reward{names} was given: end it with {{"reward": …}}, or with '
                '{"failure": "…"}'
            )
        sessions.end(AgentEnd(body.failure, body.answer, body.result, body.metrics), body.reward)
    await sessions.over.wait()
    return json_reply({"turns": sessions.turns})


async def observe(http: Request, sessions: AgentSessions) -> Response:
    """Wait until a seat is to move, and return what it reads."""
    seat = _seat(sessions)
    body = convert(read_object(await read_body(http) or b"{}"), _ObserveBody)
    if not 0 <= body.wait_s <= MAX_WAIT_S:
        raise BadRequestError(f"wait_s={body.wait_s} is not within 0 and {MAX_WAIT_S:g}")
    return json_reply(await seat.observation(body.wait_s))


async def move(http: Request, sessions: AgentSessions) -> Response:
    """Take the move of a turn, once; the same move again gets the same reply."""
    seat = _seat(sessions)
    body = convert(read_object(await read_body(http)), _MoveBody)
    seat.move(body.turn, body.text)
    return json_reply({"turn": body.turn})


def _seat(sessions: AgentSessions) -> SeatTurns:
    """Return the turns of the seat that a program plays.

    Raises:
        BadRequestError: it plays none in this way.
    """
    if sessions.seat is None:
        raise BadRequestError(
            "this session plays no seat whose program requests observations: env.roles.NAME.program.start=episode does",
            404,
        )
    return sessions.seat
