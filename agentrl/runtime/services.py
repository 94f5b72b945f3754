"""The services that sample: engines, tool servers, chat renderer. Started together, stopped together."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from agentrl.config.schema import Config
from agentrl.core.child_process import raise_file_limit
from agentrl.core.registry import make_any_env
from agentrl.core.sampler import Sampler
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
from agentrl.render.registry import make_renderer
from agentrl.render.renderer import ChatRenderer
from agentrl.rewards.grader import make_grader
from agentrl.runtime.roles import make_lineup
from agentrl.runtime.tool_servers import ToolServers

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
        """Return a runner with the sampling parameters of training; `EpisodeRunner.with_sampling` changes them.

        Args:
            sampler: in place of the engines.
        """
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
