"""The running parts that sample: engines, tool servers, runner. Started together, ended together."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agentrl.config.schema import Config
from agentrl.config.tools import ToolConfig
from agentrl.core.child_process import raise_file_limit
from agentrl.core.env import Env
from agentrl.core.registry import make_env
from agentrl.core.sampler import Sampler
from agentrl.core.task import TaskSet
from agentrl.core.tool import Tool, ToolClient
from agentrl.core.types import SamplingParams
from agentrl.episode.custom_loop import load_generate
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner
from agentrl.inference.fleet.fleet import Fleet
from agentrl.inference.launch.launcher import EngineSpec, Launcher, LocalLauncher
from agentrl.models.load import load_tokenizer
from agentrl.obs.waiting import waiting
from agentrl.render.registry import make_renderer
from agentrl.render.renderer import ChatRenderer
from agentrl.rewards.grader import make_grader
from agentrl.runtime.run_tools import run_services, served_tools, service_options, tool_url, warn_unsandboxed
from agentrl.toolserver.launch import ToolServerProcess, launch_tool
from agentrl.toolserver.service import find_service


@dataclass(slots=True)
class Stack:
    """What `open_stack` gives."""

    config: Config
    fleet: Fleet
    renderer: ChatRenderer
    tools: Mapping[str, ToolClient]
    """By registered name."""
    served: Mapping[str, Tool]
    """What a policy may call at their servers, by the tool's name."""
    servers: Mapping[str, ToolServerProcess]

    def runner(self, *, sampler: Sampler | None = None) -> EpisodeRunner:
        """Return a runner that samples as in training; `EpisodeRunner.with_sampling` makes one that samples otherwise."""
        rollout, options = self.config.rollout, self.config.sampler
        generate = load_generate(rollout.generate) if rollout.generate is not None else None
        sampling = SamplingParams(
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            seed=self.config.run.seed,
        )
        limits = Limits(
            max_turns=rollout.max_turns,
            max_tokens=rollout.max_tokens,
            max_seconds=rollout.max_seconds,
            max_new_tokens=options.max_new_tokens,
        )
        make: Callable[[], Env] = partial(make_env, self.config.env.name, self.config.env.options)
        return EpisodeRunner(
            env_factory=make,
            renderer=self.renderer,
            sampler=sampler or self.fleet.sampler,
            tool_clients=self.tools,
            limits=limits,
            sampling=sampling,
            failure=FailurePolicy(rollout.failure),
            max_concurrency=rollout.concurrency,
            generate=generate,
            grader=make_grader(self.config.reward),
            served=self.served,
        )

    def check(self) -> None:
        """Raise where no engine is left or one of our tool servers has died, with its last log lines."""
        self.fleet.check()
        for server in self.servers.values():
            server.check()


@asynccontextmanager
async def open_stack(
    config: Config,
    tasks: TaskSet,
    model: Path,
    folder: Path,
    seed: int,
    *,
    launcher: Callable[[EngineSpec], Launcher] = LocalLauncher,
) -> AsyncIterator[Stack]:
    """Start engines and tool servers side by side, wait until all are healthy, and end them on the way out.

    Args:
        config: what to start.
        tasks: given to the tool servers.
        model: what engines and tokenizer are loaded from.
        folder: gets the logs, and what tool servers keep.
        seed: of the engines.
        launcher: makes what starts the engines; on this machine without it.

    Raises:
        EngineError, ToolServerError: one does not start; the message has its last log lines.

    """
    raise_file_limit()  # an episode has a connection to an engine and one to each tool server
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as exits:
        fleet = Fleet(config.sampler, launcher(EngineSpec(config.sampler, model, logs, seed)), logs)
        exits.push_async_callback(fleet.aclose)
        services = run_services(config)
        served = served_tools(config, services)
        warn_unsandboxed(config, services)
        tool_starts = [asyncio.to_thread(_start_tool, config, name, tasks, folder, logs) for name in services]
        results = await asyncio.gather(fleet.start(), *tool_starts, return_exceptions=True)
        for started in results:
            if isinstance(started, ToolServerProcess):
                exits.callback(started.stop)
        for started in results:
            if isinstance(started, BaseException):
                raise started
        servers: dict[str, ToolServerProcess] = {}
        tools: dict[str, ToolClient] = {}
        for name, server in zip(services, results[1:], strict=True):
            url = tool_url(config, name)
            if isinstance(server, ToolServerProcess):
                servers[name], url = server, server.url
            assert url is not None
            tools[name] = services[name].client(url, service_options(config, name, services[name]))
            exits.push_async_callback(tools[name].aclose)
        renderer = make_renderer(load_tokenizer(model), config.render)
        # What is there by now mostly stays. Were the collector to look through it again and again, all episodes would wait.
        gc.collect()
        gc.freeze()
        exits.callback(gc.unfreeze)
        yield Stack(config, fleet, renderer, tools, served, servers)


def _start_tool(config: Config, name: str, tasks: TaskSet, folder: Path, logs: Path) -> ToolServerProcess | None:
    if tool_url(config, name) is not None:
        return None
    tool = config.tools.get(name, ToolConfig())
    service = find_service(name)
    file_name = re.sub(r"[^\w.-]+", "_", name)  # it may be path/to/file.py:name
    arguments = service.launch_arguments(service_options(config, name, service), tasks, folder / "tools" / file_name)
    log = logs / f"{file_name}.log"
    with waiting("start", f"of the tool server {name}"):
        return launch_tool(name, arguments, log=log, port=tool.port, timeout_s=tool.start_timeout_s)
