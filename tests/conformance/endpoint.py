"""A server of the OpenAI protocol plays episodes, and what fails there is a failure of the episode, never a reward."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from typing import Any

import httpx
import pytest
from agentrl_envs.solver_critic import SolverCriticEnv
from byte_renderer import byte_renderer
from conformance.engine import Engine

from agentrl.config.rollout import FailureConfig
from agentrl.config.services import EndpointConfig
from agentrl.core.lineup import EndpointSeat, Lineup
from agentrl.core.types import FailureKind, Rollout, SamplingParams
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.self_play.opponents import endpoint_seat
from tests.unit.episode.conftest import CHATML

CHAT_TEMPLATE = CHATML
"""Of the model that the server has."""


async def play(engine: Engine, seats: dict[str, Any]) -> Rollout:
    """Return the rollout of an episode of ``solver_critic`` in which the engine samples the policy; failed ones are dropped."""
    client = engine.client()
    runner = EpisodeRunner(
        {
            "": EpisodeSettings(
                EpisodeContext(
                    env_factory=SolverCriticEnv,
                    renderer=byte_renderer(CHATML),
                    sampler=client,
                    tool_clients={},
                    limits=Limits(4, 400, 60.0, 8),
                    sampling=SamplingParams(max_new_tokens=8),
                ),
                lineup=Lineup(seats, opponent="endpoint:model"),
            )
        },
        FailurePolicy(FailureConfig(sampler="drop", max_failed_share=1.0)),
        EpisodeSlots(1),
    )
    try:
        [rollout] = await runner.run_many([Job(SolverCriticEnv.example_task(), 3, "episode")])
    finally:
        await client.aclose()
    return rollout


def endpoint(url: str, **changes: Any) -> EndpointSeat:
    """Return the seat of the model at ``url``."""
    options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 8, "attempts": 1} | changes
    config = EndpointConfig(url=f"{url}/v1", model="model", **options)
    return endpoint_seat(config, "self_play.endpoints.big", "model")


class Endpoint:
    """The tests of this module; a subclass named ``Test…`` runs them against its module's ``engine``."""

    def test_it_plays_whole_games_with_the_conversation_so_far(self, engine: Engine) -> None:
        """In the solver's seat it has two turns: it reads its first answer again."""
        rollout = asyncio.run(play(engine, {"solver": endpoint(engine.url)}))
        solver, critic = rollout.seats
        assert (rollout.agent, rollout.failure, rollout.dropped) == ("critic", None, False)
        assert (len(solver.moves), solver.steps, critic.steps) == (2, (0, 2), (1,))
        [turn] = rollout.turns
        messages = [
            ("user", "3 + 4 = ?"),
            ("assistant", solver.moves[0]),
            ("user", f"{turn.action.strip()} Answer again."),
        ]
        for at in (1, 3):
            requests = [{"role": role, "content": text} for role, text in messages[:at]]
            body = {"model": "model", "messages": requests, "temperature": 0, "max_tokens": 8}
            [choice] = engine.post("/v1/chat/completions", body).json()["choices"]
            assert choice["message"]["content"] == solver.moves[at // 2]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"timeout_s": 0.001}, r"no reply within self_play\.endpoints\.big\.timeout_s=0.001"),
            ({"max_new_tokens": 600}, "HTTP 400: .*context length"),
        ],
    )
    def test_a_request_that_fails(self, engine: Engine, changes: dict[str, Any], message: str) -> None:
        self.check(asyncio.run(play(engine, {"solver": endpoint(engine.url, **changes)})), message)

    def test_a_server_that_is_gone(self, engine: Engine) -> None:
        with socket.socket() as stored_socket:  # bound, and does not listen
            stored_socket.bind(("127.0.0.1", 0))
            gone = endpoint(f"http://127.0.0.1:{stored_socket.getsockname()[1]}")
            self.check(asyncio.run(play(engine, {"solver": gone})), "no connection")

    def test_a_generation_that_the_server_aborts(self, engine: Engine) -> None:
        """The server replies with status 200 and the tokens so far."""
        seats = {"solver": endpoint(engine.url, max_new_tokens=400)}

        async def session() -> Rollout:
            episode = asyncio.create_task(play(engine, seats))
            async with httpx.AsyncClient(base_url=engine.url, trust_env=False) as client:
                while not episode.done():
                    await client.post("/abort_request", json={"rid": "", "abort_all": True})
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(asyncio.shield(episode), 0.1)
            return await episode

        self.check(asyncio.run(session()), "finish_reason='abort'")

    def check(self, rollout: Rollout, message: str) -> None:
        assert rollout.failure is not None
        assert (rollout.failure.kind, rollout.dropped) == (FailureKind.SAMPLER, True)
        assert "/v1/chat/completions, model model: " in rollout.failure.message
        assert re.search(message, rollout.failure.message)
