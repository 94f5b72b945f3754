"""Plays episodes of verifiers: its environment drives the loop, and requests the policy's turns from the gateway."""

from __future__ import annotations

import asyncio

import msgspec

from agentrl.adapters.verifiers.process import VerifiersError, verifiers_process
from agentrl.adapters.verifiers.tasks import FACTS, EpisodeFacts
from agentrl.config.agent import AgentConfig
from agentrl.core.errors import EnvironmentFailure
from agentrl.core.task import Task
from agentrl.core.types import Rollout
from agentrl.episode.chat import Agent
from agentrl.gateway.agent_loop import late, time_left
from agentrl.gateway.agent_sessions import AgentSessions
from agentrl.gateway.server import Gateway

_GATEWAY = Gateway()
_AGENT = AgentConfig()


class _Result(msgspec.Struct):
    """What ``play`` of ``worker.py`` returns."""

    reward: float = 0.0
    metrics: dict[str, float] = {}
    failure: str = ""


async def play(task: Task, agent: Agent) -> list[Rollout]:
    """Play an episode; a `agentrl.episode.custom_loop.Generate` function. The reward is that of verifiers' trace.

    Raises:
        EnvironmentFailure: verifiers recorded an error, such as an exception of a reward function, or its process ended.
        EpisodeError: the engine failed, or the first prompt is too long.
    """
    agent.clock.raise_nothing()  # an end at the limit has a message
    facts = msgspec.convert(task.metadata[FACTS], EpisodeFacts)
    sessions = AgentSessions.open(agent, _AGENT)
    async with _GATEWAY.serving() as url, _GATEWAY.open(sessions) as key:
        result = await _run(facts, sessions, agent, f"{url}/s/{key}/v1")
    if sessions.failure.done():
        raise sessions.failure.result()
    fault = result.failure or ("" if sessions.has_turns else "it ended without a turn of the policy")
    if fault:
        refused = f" The last refused request: {sessions.refused}" if sessions.refused else ""
        raise EnvironmentFailure(f"verifiers: {fault}.{refused}")
    sessions.set_reward(None, result.reward, result.metrics)
    return sessions.rollouts(agent)


async def _run(facts: EpisodeFacts, sessions: AgentSessions, agent: Agent, url: str) -> _Result:
    """Have an episode played, and return its result, or why there is none."""
    process = verifiers_process(facts.python)
    number, value = process.call(
        "play", config=facts.config, index=facts.index, size=facts.size, url=url, model=_AGENT.model
    )
    result = asyncio.wrap_future(value)
    try:
        while (left_s := time_left(agent.clock)) > 0:
            # The clock stands still while engines sample, so that there may be time left then.
            ends: set[asyncio.Future[object]] = {result, asyncio.ensure_future(asyncio.shield(sessions.failure))}
            await asyncio.wait(ends, timeout=max(0.05, left_s), return_when=asyncio.FIRST_COMPLETED)
            if result.done():
                return msgspec.convert(result.result(), _Result)
            if sessions.failure.done():
                return _Result()
        return _Result(failure=late(agent.clock))
    except VerifiersError as error:
        return _Result(failure=str(error))
    finally:
        process.cancel(number)
