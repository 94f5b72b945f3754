"""Starts what self-play needs in a training run: the engines of snapshots."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from agentrl.config.schema import Config
from agentrl.config.self_play import PAST, SelfPlayConfig
from agentrl.core.multi_agent_env import MultiAgentEnv
from agentrl.core.registry import make_any_env
from agentrl.inference.fleet.fleet import Fleet
from agentrl.inference.launch.launcher import EngineSpec, Launcher, LocalLauncher, RunningEngine
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
    sampler = config.sampler.model_copy(update={"engines": 1, "url": None, "port": 0, "router": "builtin"})
    first = config.sampler.engines + len(config.algo.distillation.teachers)
    fleets = []
    for number in range(given.engines if PAST in given.mix else 0):
        logs = folder / "logs" / f"opponent-{number}"
        logs.mkdir(parents=True, exist_ok=True)
        spec = EngineSpec(sampler, model, logs, config.run.seed, config.model.trust_remote_code)
        vocabulary = services.fleet.vocabulary
        fleet = Fleet(
            sampler,
            _From(LocalLauncher(spec), first + number),
            logs,
            vocabulary=vocabulary,
            max_tokens=config.max_tokens,
        )
        exits.push_async_callback(fleet.aclose)
        fleets.append(fleet)
    await asyncio.gather(*(fleet.start() for fleet in fleets))
    services.opponents = fleets
    snapshots = folder / SNAPSHOTS
    return SelfPlay(
        config=given,
        league=League(given, config.run.seed),
        agents=list(env.possible_agents),
        folder=folder,
        engines=[OpponentEngine(fleet, snapshots) for fleet in fleets],
        log=LeagueLog(folder, resume_after),
        bucket_bytes=bucket_bytes_of("disk", config.weights.bucket_mib),
        dtype=dtype,
    )


class _From:
    """A launcher whose engines have the numbers from ``first`` on: they take the GPUs after those of other engines."""

    def __init__(self, launcher: Launcher, first: int) -> None:
        self._launcher = launcher
        self._first = first

    def launch(self, number: int) -> RunningEngine:
        """Start an engine; see `Launcher.launch`."""
        return self._launcher.launch(self._first + number)
