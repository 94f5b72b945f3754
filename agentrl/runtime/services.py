"""The services that sample: engines, tool servers, chat renderer. Started together, stopped together."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.judges import time_shared_judges
from agentrl.config.runners import agent_elsewhere, runner_count
from agentrl.config.schema import Config
from agentrl.core.child_process import LOOPBACK, raise_file_limit
from agentrl.core.sampler import Sampler
from agentrl.data.task_sources import TaskSources
from agentrl.episode.runner import EpisodeSlots, GroupRunner
from agentrl.inference.fleet.fleet import Fleet
from agentrl.inference.fleet.reserved_engines import frozen_fleets
from agentrl.inference.fleet.time_sharing import EngineTimeSharing
from agentrl.inference.launch.launcher import EngineSpec, Launcher, LocalLauncher
from agentrl.render.renderer import ChatRenderer
from agentrl.runtime.episodes import make_runner, open_renderer
from agentrl.runtime.garbage import rare_collections
from agentrl.runtime.judges import (
    JudgeLauncher,
    JudgeModel,
    OtherModels,
    check_judge_endpoints,
    engine_judges,
    judge_fleets,
    open_judge_models,
)
from agentrl.runtime.runners.pool import RunnerPool
from agentrl.runtime.runners.runner import RemoteRunners
from agentrl.runtime.time_shared_runner import TimeSharedRunner
from agentrl.runtime.tool_servers import ToolServers
from agentrl.toolserver.request_limits import TOKEN_VARIABLE

if TYPE_CHECKING:
    from agentrl.gateway.agents_elsewhere import AgentsElsewhere


@dataclass(slots=True)
class Services:
    """Running engines and tool servers, and the renderer of the policy's chat format."""

    config: Config
    fleet: Fleet
    renderer: ChatRenderer
    tools: ToolServers
    exits: AsyncExitStack
    """What ends with the services."""
    reserved: list[Fleet] = field(default_factory=list)
    """Engines of past snapshots in self-play, and those that only evaluate."""
    frozen: Mapping[str, Fleet] = field(default_factory=dict)
    """Engines of weights that never change, by `RoleConfig.frozen`."""
    judges: Mapping[str, Fleet] = field(default_factory=dict)
    """Engines of judges, by ``judge.model``."""
    judge_models: Mapping[str, JudgeModel] = field(default_factory=dict)
    """The models of these."""
    time_sharing: EngineTimeSharing | None = None
    """Switches GPUs between the policy's engines and those of judges; None: they share none in turn."""
    check_learner: Callable[[], None] = lambda: None
    """Raises if a process of the learner of a training run was lost."""
    pool: RunnerPool | None = None
    """Runner processes; None: episodes run in this process."""
    agents: AgentsElsewhere | None = None
    """Where agents that run elsewhere start sessions; None: the run has none."""

    def runner(self, *, sampler: Sampler | None = None) -> GroupRunner:
        """Return a runner with the sampling parameters of training; `GroupRunner.with_sampling` changes them.

        Args:
            sampler: in place of the engines of training. With one that is not of `fleets` the episodes run in this process.
        """
        sampler = sampler or self.fleet.sampler
        fleet = next((fleet for fleet in self.fleets if fleet.sampler is sampler), None)
        if self.pool is not None and fleet is not None:
            return self._share_time(self.pool.runner(fleet))
        frozen = {name: frozen_fleet.sampler for name, frozen_fleet in self.frozen.items()}
        judges = {name: judge_fleet.sampler for name, judge_fleet in self.judges.items()}
        models = OtherModels(frozen, engine_judges(self.judge_models, judges))
        slots = EpisodeSlots(self.config.rollout.concurrency)
        self.exits.callback(slots.close)
        runner = make_runner(self.config, self.renderer, sampler, self.tools, models, slots, self.agents)
        return self._share_time(runner)

    def _share_time(self, runner: GroupRunner) -> GroupRunner:
        return runner if self.time_sharing is None else TimeSharedRunner(runner, self.time_sharing)

    @property
    def agents_line(self) -> str:
        """Where agents that run elsewhere start sessions, as a line for the user; empty if the run has none."""
        return "" if self.agents is None else f"agents start sessions at {self.agents.gateway.url}/v1/sessions"

    @property
    def fleets(self) -> list[Fleet]:
        """All engines: those of training, of frozen roles, of judges, and others."""
        return [self.fleet, *self.frozen.values(), *self.judges.values(), *self.reserved]

    def check(self) -> None:
        """Raise if no engine is left, or if a tool server, a runner or a process of the learner is lost for good."""
        for fleet in self.fleets:
            fleet.check()
        if self.time_sharing is not None:
            self.time_sharing.check()
        self.tools.check()
        if self.pool is not None:
            self.pool.check()
        self.check_learner()


@asynccontextmanager
async def open_services(
    config: Config,
    tasks: TaskSources,
    model: Path,
    folder: Path,
    seed: int,
    *,
    launcher: Callable[[EngineSpec], Launcher] = LocalLauncher,
    judge_launcher: JudgeLauncher | None = None,
    runners: RemoteRunners | None = None,
) -> AsyncIterator[Services]:
    """Start engines and tool servers concurrently, wait until all are healthy, and stop them on exit.

    Args:
        config: of the run.
        tasks: of each source, passed to the tool servers.
        model: folder that engines and tokenizer are loaded from.
        folder: of the run; gets the logs, and the files of tool servers.
        seed: of the engines.
        launcher: makes what starts the engines; by default on this machine.
        judge_launcher: makes what starts the engines of judges; by default on this machine.
        runners: starts runner processes; None: on this machine.

    Raises:
        ConfigError: the endpoint of a judge refuses a first request, or does not answer.
        EngineError, ToolServerError: one does not start; the message has its last log lines.
    """
    raise_file_limit()  # an episode has a connection to an engine and one to each tool server
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    await check_judge_endpoints(config)
    async with AsyncExitStack() as exits:
        renderer, vocabulary = open_renderer(config, model)
        trusted, returns_experts = config.model.trust_remote_code, vocabulary.routing is not None
        shared_judges = time_shared_judges(config)
        spec = EngineSpec(config.sampler, model, logs, seed, trusted, returns_experts=returns_experts)
        engines = launcher(replace(spec, restores_weights=bool(shared_judges)))
        fleet = Fleet(
            config.sampler,
            engines,
            logs,
            vocabulary=vocabulary,
            max_tokens=config.max_tokens,
            prefix_cache=config.weights.prefix_cache,
            restores_weights=bool(shared_judges),
        )
        exits.push_async_callback(fleet.aclose)
        if runners is not None:
            exits.enter_context(_tools_token())  # servers that other machines reach require one
        tools = ToolServers(config, tasks, folder, logs, host=LOOPBACK if runners is None else runners.address)
        exits.push_async_callback(tools.aclose)
        frozen = frozen_fleets(config, logs, vocabulary)
        for frozen_fleet in frozen.values():
            exits.push_async_callback(frozen_fleet.aclose)
        opponents = 0 if config.self_play is None else config.self_play.snapshot_engines
        judge_models = open_judge_models(config)
        judges = judge_fleets(config, judge_models, logs, len(frozen) + opponents, judge_launcher)
        for judge_fleet in judges.values():
            exits.push_async_callback(judge_fleet.aclose)
        services = Services(
            config, fleet, renderer, tools, exits, frozen=frozen, judges=judges, judge_models=judge_models
        )
        if (agent := agent_elsewhere(config)) is not None:
            from agentrl.gateway.agents_elsewhere import AgentsElsewhere  # its server takes a while to import

            services.agents = AgentsElsewhere(agent)
            await exits.enter_async_context(services.agents.serving())
        other_fleets = [*frozen.values(), *(judges[name] for name in judges.keys() - shared_judges.keys())]
        starts = [engines_fleet.start() for engines_fleet in other_fleets]
        if shared_judges:
            services.time_sharing = EngineTimeSharing(fleet, {name: judges[name] for name in shared_judges})
            exits.push_async_callback(services.time_sharing.aclose)
            starts.append(services.time_sharing.start())
        else:
            starts.append(fleet.start())
        if count := runner_count(config):
            pool = RunnerPool(config, count, model, logs, lambda: services.fleets, runners)
            exits.push_async_callback(pool.aclose)
            starts.append(pool.spawn())
        for error in await asyncio.gather(tools.start(), *starts, return_exceptions=True):
            if isinstance(error, BaseException):
                raise error
        if count:
            await pool.start(tools.urls, single=services.runner().has_single_rollouts)
            services.pool = pool
        exits.enter_context(rare_collections())
        yield services


@contextmanager
def _tools_token() -> Iterator[None]:
    """Have a token for tool servers in the environment, which they, their clients and runners inherit."""
    if os.environ.get(TOKEN_VARIABLE):
        yield
        return
    os.environ[TOKEN_VARIABLE] = secrets.token_hex(16)
    try:
        yield
    finally:
        del os.environ[TOKEN_VARIABLE]
