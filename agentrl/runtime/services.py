"""The services that sample: engines, tool servers, chat renderer. Started together, stopped together."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from agentrl.config.schema import Config
from agentrl.config.toolserver import ToolConfig
from agentrl.core.child_process import raise_file_limit
from agentrl.core.errors import AgentrlError, ConfigError, ToolServerError
from agentrl.core.registry import make_any_env
from agentrl.core.sampler import Sampler
from agentrl.core.task import Task, TaskSet
from agentrl.core.tool import Tool, ToolClient
from agentrl.core.types import SamplingParams
from agentrl.data.task_sources import TaskSources
from agentrl.episode.context import EpisodeContext
from agentrl.episode.custom_loop import load_generate
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.inference.client.segments import Vocabulary
from agentrl.inference.fleet.fleet import Fleet
from agentrl.inference.fleet.reserved_engines import frozen_fleets
from agentrl.inference.launch.launcher import EngineSpec, Launcher, LocalLauncher
from agentrl.models.load import load_tokenizer, read_end_ids, read_routing, read_vocab_size
from agentrl.models.reference_policy import resolve_frozen
from agentrl.obs.waiting import waiting
from agentrl.render.registry import make_renderer
from agentrl.render.renderer import ChatRenderer
from agentrl.rewards.grader import make_grader
from agentrl.runtime.roles import make_lineup
from agentrl.runtime.run_tools import run_services, served_tools, service_options, tool_url, warn_unsandboxed
from agentrl.toolserver.launch import ToolServerProcess, launch_tool

_log = logging.getLogger(__name__)


class JoinedCorpora(TaskSet):
    """The corpora of the tasksets of several sources, which share the server of a tool."""

    def __init__(self, tool: str, tasks: TaskSources) -> None:
        self._tool, self._tasks = tool, tasks

    def split(self, name: str) -> Sequence[Task]:
        """Return an empty sequence: a server gets no tasks."""
        return ()

    def corpora(self) -> Mapping[str, Iterable[Mapping[str, str]]]:
        """Return all corpora.

        Raises:
            ConfigError: two tasksets have a corpus of one name.
        """
        corpora: dict[str, Iterable[Mapping[str, str]]] = {}
        owners: dict[str, tuple[str, TaskSet]] = {}
        for source, tasks in self._tasks.items():
            for name, documents in tasks.corpora().items():
                owner_source, owner = owners.setdefault(name, (source, tasks))
                if owner is not tasks:
                    raise ConfigError(
                        f"sources.{owner_source} and sources.{source} share the server of the tool {self._tool!r}, and the "
                        f"tasksets of both have a corpus {name!r}: give them the same tasks.name and tasks.options, or set "
                        f"tools.{self._tool}.options.corpus"
                    )
                corpora.setdefault(name, documents)
        return corpora


@dataclass(slots=True)
class StartedServer:
    """A tool server that the run has started, and starts again on the same port when it dies."""

    name: str
    process: ToolServerProcess
    launch: Callable[[int], ToolServerProcess]
    """Starts it on a port, and blocks until it answers."""
    max_restarts: int
    """``tools.NAME.max_restarts``."""
    restarts: int = 0
    _starting: asyncio.Task[ToolServerProcess] | None = None

    def check(self) -> None:
        """Begin to start the server again if it has died. Meanwhile its clients wait, and retry. Called in the event loop.

        Raises:
            ToolServerError: it died once more than it may, or does not start again; with its last log lines.
            PortInUseError: something else listens on its port.
        """
        if self._starting is not None:
            if not self._starting.done():
                return
            self.process, self._starting = self._starting.result(), None
        try:
            self.process.check()
        except ToolServerError as error:
            if self.restarts == self.max_restarts:
                raise ToolServerError(f"tools.{self.name}.max_restarts={self.max_restarts}: {error}") from None
            self.restarts += 1
            why = str(error).partition("\n")[0].rstrip(":")
            _log.warning("starting it again (%d of %d): %s", self.restarts, self.max_restarts, why)
            self._starting = asyncio.create_task(asyncio.to_thread(self._start_again))

    def _start_again(self) -> ToolServerProcess:
        self.process.stop()  # what is left of its process group
        with waiting("start", f"of the tool server {self.name}, which has died"):
            return self.launch(urlsplit(self.process.url).port or 0)

    async def aclose(self) -> None:
        """Stop the server. If it is being started, it is stopped once it has started."""
        if self._starting is not None:
            with suppress(AgentrlError):  # it has not started
                self.process = await self._starting
        await asyncio.to_thread(self.process.stop)


class ToolServers:
    """Servers and clients of all tools that the environment or the multi-turn loop needs.

    Args:
        config: of the run.
        tasks: of each source, passed to the servers that are started for it. Sources share a server.
        folder: of the run; servers write to ``tools/``.
        logs: folder of their logs.

    Raises:
        UserError: a tool does not exist, or its options do not fit.
    """

    def __init__(self, config: Config, tasks: TaskSources, folder: Path, logs: Path) -> None:
        self._config, self._tasks, self._folder, self._logs = config, tasks, folder, logs
        self._services = run_services(config)
        self._source_services = {name: run_services(source) for name, source in config.by_source().items()}
        self._started: list[StartedServer] = []
        self.offered: Mapping[str, Mapping[str, Tool]] = {
            name: served_tools(config, services) for name, services in self._source_services.items()
        }
        """What a policy may call at the servers in the episodes of each source, by the tool's name."""
        self.clients: dict[str, ToolClient] = {}
        """By the tool's registered name."""

    async def start(self) -> None:
        """Start all servers without an address concurrently, and wait until they answer.

        Raises:
            ToolServerError: a server does not start; the message has its last log lines.
        """
        warn_unsandboxed(self._config, self._services)
        starts = [asyncio.to_thread(self._start, name) for name in self._services]
        results = await asyncio.gather(*starts, return_exceptions=True)
        self._started = [started for started in results if isinstance(started, StartedServer)]
        for (name, service), started in zip(self._services.items(), results, strict=True):
            if isinstance(started, BaseException):
                raise started
            url = tool_url(self._config.tools, name) if started is None else started.process.url
            assert url is not None
            self.clients[name] = service.client(url, service_options(self._config, name, service))

    def _start(self, name: str) -> StartedServer | None:
        """Return a started server, or None if the configuration has the address of a running one."""
        if tool_url(self._config.tools, name) is not None:
            return None
        tool, service = self._config.tools.get(name, ToolConfig()), self._services[name]
        file_name = re.sub(r"[^\w.-]+", "_", name)  # the name may be path/to/file.py:name
        options = service_options(self._config, name, service)
        arguments = service.launch_arguments(options, self._tasks_for(name), self._folder / "tools" / file_name)
        log = self._logs / f"{file_name}.log"

        def launch(port: int) -> ToolServerProcess:
            return launch_tool(name, arguments, log=log, port=port, timeout_s=tool.start_timeout_s)

        with waiting("start", f"of the tool server {name}"):
            return StartedServer(name, launch(tool.port), launch, tool.max_restarts)

    def source_clients(self, source: str) -> dict[str, ToolClient]:
        """Return the clients of the tools that a source needs, by registered name."""
        return {name: self.clients[name] for name in self._source_services[source]}

    def _tasks_for(self, tool: str) -> TaskSet:
        """Return the tasks of the sources that need a tool, for its server."""
        needing = {name: tasks for name, tasks in self._tasks.items() if tool in self._source_services.get(name, ())}
        distinct = list({id(tasks): tasks for tasks in needing.values()}.values())
        return distinct[0] if len(distinct) == 1 else JoinedCorpora(tool, needing)

    async def aclose(self) -> None:
        """Close the clients and stop the servers that were started."""
        for client in self.clients.values():
            await client.aclose()
        for server in self._started:
            await server.aclose()

    def check(self) -> None:
        """Start servers again that have died; raise if one died too often: see `StartedServer.check`."""
        for server in self._started:
            server.check()


_NEW_OBJECTS = 100_000
"""New objects after which the garbage collector looks at them. A reply of an engine has hundreds, most of them gone soon; an
episode in progress has about 200, and leaves no garbage for it."""


@dataclass(slots=True)
class Services:
    """Running engines and tool servers, and the renderer of the policy's chat format."""

    config: Config
    fleet: Fleet
    renderer: ChatRenderer
    tools: ToolServers
    reserved: list[Fleet] = field(default_factory=list)
    """Engines of past snapshots in self-play, and those that only evaluate."""
    frozen: Mapping[str, Fleet] = field(default_factory=dict)
    """Engines of weights that never change, by `RoleConfig.frozen`."""
    check_learner: Callable[[], None] = lambda: None
    """Raises if a process of the learner of a training run was lost."""

    def runner(self, *, sampler: Sampler | None = None) -> EpisodeRunner:
        """Return a runner with the sampling parameters of training, for the engines or another ``sampler``."""
        sources = self.config.by_source()
        settings = {name: self._episode_settings(name, config, sampler) for name, config in sources.items()}
        rollout = next(iter(sources.values())).rollout
        return EpisodeRunner(settings, FailurePolicy(rollout.failure), EpisodeSlots(rollout.concurrency))

    def _episode_settings(self, source: str, config: Config, sampler: Sampler | None) -> EpisodeSettings:
        rollout, options = config.rollout, config.sampler
        sampling = SamplingParams(
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            seed=config.run.seed,
            experts_from=0 if config.algo.routing_replay else None,
        )
        limits = Limits(
            max_turns=rollout.max_turns,
            max_tokens=rollout.max_tokens,
            max_seconds=rollout.max_seconds,
            max_new_tokens=options.max_new_tokens,
        )
        context = EpisodeContext(
            env_factory=partial(make_any_env, config.env.name, config.env.options),
            renderer=self.renderer,
            sampler=sampler or self.fleet.sampler,
            tool_clients=self.tools.source_clients(source),
            limits=limits,
            sampling=sampling,
            served=self.tools.offered[source],
        )
        return EpisodeSettings(
            context,
            load_generate(rollout.generate) if rollout.generate is not None else None,
            make_grader(config.reward),
            make_lineup(config.env, {name: fleet.sampler for name, fleet in self.frozen.items()}),
        )

    def check(self) -> None:
        """Raise if no engine is left, a tool server of the run has died, or a process of its learner was lost."""
        for fleet in (self.fleet, *self.reserved, *self.frozen.values()):
            fleet.check()
        self.tools.check()
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
) -> AsyncIterator[Services]:
    """Start engines and tool servers concurrently, wait until all are healthy, and stop them on exit.

    Args:
        config: of the run.
        tasks: of each source, passed to the tool servers.
        model: folder that engines and tokenizer are loaded from.
        folder: of the run; gets the logs, and the files of tool servers.
        seed: of the engines.
        launcher: makes what starts the engines; by default on this machine.

    Raises:
        EngineError, ToolServerError: one does not start; the message has its last log lines.
    """
    raise_file_limit()  # an episode has a connection to an engine and one to each tool server
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as exits:
        trusted = config.model.trust_remote_code
        end_ids = [index for path in (model, *resolve_frozen(config).values()) for index in read_end_ids(path)]
        renderer = make_renderer(load_tokenizer(model, trust_remote_code=trusted), config.render, end_ids)
        routing = read_routing(model) if config.algo.replays_routing else None
        engines = launcher(EngineSpec(config.sampler, model, logs, seed, trusted, returns_experts=routing is not None))
        vocabulary = Vocabulary(read_vocab_size(model), renderer.decode, routing)
        fleet = Fleet(
            config.sampler,
            engines,
            logs,
            vocabulary=vocabulary,
            max_tokens=config.max_tokens,
            prefix_cache=config.weights.prefix_cache,
        )
        exits.push_async_callback(fleet.aclose)
        tools = ToolServers(config, tasks, folder, logs)
        exits.push_async_callback(tools.aclose)
        frozen = frozen_fleets(config, logs, vocabulary)
        for frozen_fleet in frozen.values():
            exits.push_async_callback(frozen_fleet.aclose)
        starts = [engines_fleet.start() for engines_fleet in (fleet, *frozen.values())]
        for error in await asyncio.gather(tools.start(), *starts, return_exceptions=True):
            if isinstance(error, BaseException):
                raise error
        # Most objects that exist now stay: scanning them in every garbage collection would delay all episodes.
        gc.collect()
        gc.freeze()
        exits.callback(gc.unfreeze)
        exits.callback(gc.set_threshold, *gc.get_threshold())
        gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])
        yield Services(config, fleet, renderer, tools, frozen=frozen)
