"""Starts what self-play needs in a training run: the engines of snapshots."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from agentrl.config.schema import Config
from agentrl.core.lineup import Lineup
from agentrl.core.multi_agent_env import MultiAgentEnv
from agentrl.core.registry import make_any_env
from agentrl.runtime.reserved_engines import reserved_fleet
from agentrl.runtime.services import Services
from agentrl.selfplay.league import League
from agentrl.selfplay.league_log import LeagueLog
from agentrl.train.self_play import SNAPSHOTS, SelfPlay
from agentrl.train.snapshot_engines import OpponentEngine, SnapshotEngines
from agentrl.weight_sync.registry import bucket_bytes_of


async def open_self_play(
    config: Config,
    folder: Path,
    model: Path,
    services: Services,
    exits: AsyncExitStack,
    dtype: str | None,
    resume_after: int | None,
) -> SelfPlay | None:
    """Start the engines of snapshots, after those of the policy and of teachers; return the players of a run with self-play."""
    given = config.self_play
    if given is None:
        return None
    env = make_any_env(config.env.name, config.env.options)
    assert isinstance(env, MultiAgentEnv), "it was checked"
    fleets = []
    for number in range(given.snapshot_engines):
        logs = folder / "logs" / f"opponent-{number}"
        fleets.append(reserved_fleet(config, model, logs, number, services.fleet.vocabulary))
        exits.push_async_callback(fleets[-1].aclose)
    await asyncio.gather(*(fleet.start() for fleet in fleets))
    services.reserved += fleets
    snapshots, who = folder / SNAPSHOTS, Lineup(policies=config.env.policy_of)
    lora = config.learner.lora if config.weights.adapters == "only" else None
    names = [] if lora is None else lora.policies
    return SelfPlay(
        config=given,
        league=League(given, config.run.seed),
        agents=list(env.possible_agents),
        tasks=config.rollout.batch_size,
        folder=folder,
        engines=SnapshotEngines([OpponentEngine(fleet, snapshots, policies=names) for fleet in fleets]),
        log=LeagueLog(folder, resume_after),
        bucket_bytes=bucket_bytes_of("disk", config.weights.bucket_mib),
        dtype=dtype,
        lora=lora,
        policies={agent: who.policy(agent, env.role_of(agent)) for agent in env.possible_agents},
    )
