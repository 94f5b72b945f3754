"""Starts what self-play needs in a training run: the engines of snapshots."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from agentrl.config.schema import Config
from agentrl.config.self_play import PAST, SelfPlayConfig
from agentrl.core.lineup import Lineup
from agentrl.core.multi_agent_env import MultiAgentEnv
from agentrl.core.registry import make_any_env
from agentrl.runtime.reserved_engines import reserved_fleet
from agentrl.runtime.services import Services
from agentrl.selfplay.league import League
from agentrl.selfplay.league_log import LeagueLog
from agentrl.train.self_play import SNAPSHOTS, OpponentEngine, SelfPlay
from agentrl.weight_sync.registry import bucket_bytes_of


async def open_self_play(
    config: Config,
    given: SelfPlayConfig,
    folder: Path,
    model: Path,
    services: Services,
    exits: AsyncExitStack,
    dtype: str | None,
    resume_after: int | None,
) -> SelfPlay:
    """Start the engines of snapshots, after those of the policy and of teachers, and return the players of a run."""
    env = make_any_env(config.env.name, config.env.options)
    assert isinstance(env, MultiAgentEnv), "it was checked"
    fleets = []
    for number in range(given.engines if PAST in given.mix else 0):
        logs = folder / "logs" / f"opponent-{number}"
        fleets.append(reserved_fleet(config, model, logs, number, services.fleet.vocabulary))
        exits.push_async_callback(fleets[-1].aclose)
    await asyncio.gather(*(fleet.start() for fleet in fleets))
    services.reserved += fleets
    snapshots, who = folder / SNAPSHOTS, Lineup(policies=config.env.policy_of)
    return SelfPlay(
        config=given,
        league=League(given, config.run.seed),
        agents=list(env.possible_agents),
        folder=folder,
        engines=[OpponentEngine(fleet, snapshots, policies=config.env.policies) for fleet in fleets],
        log=LeagueLog(folder, resume_after),
        bucket_bytes=bucket_bytes_of("disk", config.weights.bucket_mib),
        dtype=dtype,
        lora=config.learner.lora if config.env.policies else None,
        policies={agent: who.policy(agent, env.role_of(agent)) for agent in env.possible_agents},
    )
