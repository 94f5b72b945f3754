"""A policy behind the gateway's chat completions, in a thread, for clients that know an address, a key and a name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agentrl import Agent, Message, Task
from agentrl.config.agent import AgentConfig
from agentrl.core.env import Env
from agentrl.core.sampler import Sampler
from agentrl.core.types import SamplingParams
from agentrl.episode.context import EpisodeContext
from agentrl.episode.limits import Limits
from agentrl.episode.state import EpisodeState
from agentrl.gateway.agent_sessions import AgentSessions
from agentrl.gateway.server import Gateway
from agentrl.render.base import Renderer

_MANY = 10**6


@contextmanager
def serve_policy(renderer: Renderer, make_sampler: Callable[[], Sampler], max_tokens: int) -> Iterator[tuple[str, str]]:
    """Serve a policy, greedily, and yield the address up to ``/v1`` and the key.

    Args:
        renderer: of its chat format.
        make_sampler: returns its sampler, in the event loop of the thread.
        max_tokens: of a conversation.
    """
    started, served = threading.Event(), list[tuple[str, str]]()
    loop = asyncio.new_event_loop()
    ended = asyncio.Event()

    async def serve() -> None:
        sampler = make_sampler()
        limits = Limits(_MANY, max_tokens, 3600.0, max_tokens)
        sampling = SamplingParams(max_new_tokens=max_tokens, temperature=0.0)
        context = EpisodeContext(Env, renderer, sampler, {}, limits, sampling)
        agent = Agent(context, Task("t", (Message("user", ""),)), EpisodeState("served", 0))
        gateway = Gateway()
        async with gateway.serving() as url, gateway.open(AgentSessions.open(agent, AgentConfig())) as key:
            served.append((f"{url}/v1", key))
            started.set()
            await ended.wait()
        await agent.close()
        close = getattr(sampler, "aclose", None)
        if close is not None:
            await close()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        finally:
            started.set()
            loop.close()

    thread = threading.Thread(target=run, name="served policy")
    thread.start()
    try:
        assert started.wait(60)
        yield served[0]
    finally:
        if not loop.is_closed():
            loop.call_soon_threadsafe(ended.set)
        thread.join(60)
