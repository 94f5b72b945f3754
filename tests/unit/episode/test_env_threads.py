"""Where the methods of environments run: steps that do not block on the event loop, all others in threads."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from agentrl_envs.kuhn_poker import KuhnPokerEnv

from agentrl.core.env import Env, Step
from agentrl.core.errors import EnvironmentFailure
from agentrl.core.task import Task
from agentrl.core.types import Action, Message, SamplingParams
from agentrl.episode.context import EpisodeContext
from agentrl.episode.env_threads import ThreadedEnv, ThreadedMultiAgentEnv
from agentrl.episode.limits import Limits

TASK = Task("t", (Message("user", "q"),))


class Blocking(Env):
    def step(self, action: Action) -> Step:
        if action.content == "fail":
            raise KeyError("lost")
        return (), 0.0, True, False, {"thread": threading.current_thread()}


class Quick(Blocking):
    blocking = False


class QuickGame(KuhnPokerEnv):
    def step(self, actions: dict[str, Message]) -> Any:
        self.stepped_in = threading.current_thread()
        return super().step(actions)


def context(env: Any) -> EpisodeContext:
    limits = Limits(max_turns=2, max_tokens=512, max_seconds=30.0, max_new_tokens=16)
    sampling = SamplingParams(max_new_tokens=16)
    with_env = EpisodeContext(
        env_factory=env, renderer=None, sampler=None, tool_clients={}, limits=limits, sampling=sampling
    )
    return replace(with_env, pool=ThreadPoolExecutor(1))


@pytest.mark.parametrize(("kind", "on_loop"), [(Blocking, False), (Quick, True)])
def test_a_step_runs_on_the_event_loop_if_it_does_not_block(kind: type[Env], on_loop: bool) -> None:
    async def play() -> bool:
        env = ThreadedEnv(context(kind))
        await env.reset(TASK, 1)
        info = (await env.step(Message("assistant", "a")))[-1]
        with pytest.raises(EnvironmentFailure, match=rf"{kind.__name__}\.step.*KeyError: 'lost'"):
            await env.step(Message("assistant", "fail"))
        return info["thread"] is threading.current_thread()

    assert asyncio.run(play()) == on_loop


@pytest.mark.parametrize("blocking", [True, False])
def test_so_does_that_of_a_game(blocking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QuickGame, "blocking", blocking)

    async def play() -> bool:
        env = ThreadedMultiAgentEnv(context(QuickGame))
        await env.reset(QuickGame.example_task(), 1)
        (agent,) = env.env.acting
        await env.step({agent: Message("assistant", "check")})
        return env.env.stepped_in is threading.current_thread()

    assert asyncio.run(play()) != blocking
