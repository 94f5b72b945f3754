"""What a training run has on Ray: reserved placement, learner ranks, and the launcher of its engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from agentrl.cluster.engine_actors import OwnLocations, PolicyLocations, RayLauncher, SharedLocations
from agentrl.cluster.learner_group import RayCritic, RayLearnerGroup, start_critic, start_learners
from agentrl.cluster.placement_group import ActorLocation, ReservedPlacement
from agentrl.cluster.placement_layout import lay_out, spreads_runners
from agentrl.cluster.rank_actors import RankActors
from agentrl.cluster.ray_address import learner_device
from agentrl.cluster.ray_runtime import LOOK_S, RayRuntime, check_ray, store_bytes
from agentrl.cluster.runner_actors import RayRunners
from agentrl.config.judges import judge_keys
from agentrl.config.schema import Config
from agentrl.core.background import run_in_daemon_thread
from agentrl.core.errors import ConfigError
from agentrl.inference.launch.launcher import EngineSpec, Launcher, LocalLauncher
from agentrl.learner.base import CriticGroup, LearnerGroup
from agentrl.learner.checkpoints import CRITIC
from agentrl.models.reference_policy import resolve_critic, resolve_reference
from agentrl.models.sharded_weights import is_sharded


@dataclass(slots=True)
class RunCluster:
    """Starts the learner, with its critic if there is one, in the background while the caller starts engines, and ends
    everything in `aclose`.

    The processes start in `open`, and load the model from `load` on. With ``placement.mode=colocate`` they load it only in
    `learner`, after the engines have released the GPUs.
    """

    config: Config
    folder: Path
    """Folder of the run."""
    model: Path
    """Folder of the initial weights, which are read from `load` on."""
    shape: Path
    """Folder of a model of the same shape that is there already."""
    checkpoint: Path | None = None
    """Checkpoint that the learner loads."""
    with_engines: bool = True
    """Whether the run has engines; a replay has none, and reserves nothing."""
    _placement: ReservedPlacement | None = field(default=None, init=False)
    _launcher: RayLauncher | None = field(default=None, init=False)
    """Launcher of the policy's engines."""
    _critic: RayCritic | None = field(default=None, init=False)
    _started: asyncio.Future[RayLearnerGroup] = field(init=False)
    _loaded: asyncio.Future[RayLearnerGroup] | None = field(default=None, init=False)
    _exits: AsyncExitStack = field(default_factory=AsyncExitStack, init=False)

    async def open(self) -> None:
        """Reserve what ``placement.mode`` needs, and start the learner's ranks in the background.

        Raises:
            ConfigError: Ray will never have the resources.
            LearnerError: Ray does not start, or did not give the resources in time.
        """
        if self.config.placement.reserves_gpus and self.with_engines:
            layout = lay_out(self.config, learner_device(self.config.learner))
            runtime = RayRuntime(cpus=layout.total["CPU"], store_bytes=store_bytes(self.shape))
            timeout_s = self.config.learner.start_timeout_s
            spreads = partial(spreads_runners, self.config)
            cancelled, reserve = threading.Event(), ReservedPlacement.reserve
            reserving = asyncio.ensure_future(
                asyncio.to_thread(reserve, layout, runtime, timeout_s, spreads, cancelled)
            )
            self._exits.push_async_callback(self._close_placement, reserving, cancelled)
            self._placement = await asyncio.shield(reserving)
        self._started = asyncio.ensure_future(self._start())
        self._exits.push_async_callback(self._close_ranks)

    def load(self) -> None:
        """Begin to load the weights, unless learner and engines share GPUs."""
        if self._placement is None or not self.config.placement.shares_gpus:
            self._loaded = asyncio.ensure_future(self._load())

    async def engine_launcher(self) -> Callable[[EngineSpec], Launcher]:
        """Return what starts the engines: on this machine, or in the reserved placement."""
        placement = self._placement
        if placement is None:
            return LocalLauncher
        ranks = await asyncio.shield(self._started)

        def launch_policy(spec: EngineSpec) -> Launcher:
            self._launcher = RayLauncher(spec, placement, PolicyLocations(placement, ranks.actor_locations))
            return self._launcher

        return launch_policy

    async def judge_launcher(self) -> Callable[[str, EngineSpec], Launcher] | None:
        """Return what starts the engines of judges in the reserved placement; None: they are on this machine."""
        placement = self._placement
        if placement is None:
            return None
        ranks = await asyncio.shield(self._started)
        layout, config = placement.layout, self.config

        def gpu_actors() -> Sequence[tuple[int, ActorLocation]]:
            """Return the bundles and locations of what judges share GPUs with."""
            if config.placement.shares_gpus:
                locations = ranks.actor_locations()
                return [*zip(placement.layout.ranks, locations, strict=True)]
            assert self._launcher is not None, "the policy's engines start first"
            return [
                (bundle, location)
                for engine, bundles in enumerate(layout.engines)
                for bundle, location in zip(bundles, self._launcher.locations(engine), strict=True)
            ]

        def launch_judge(model: str, spec: EngineSpec) -> Launcher:
            if model in layout.judges:
                bundles = [[bundle] for bundle in layout.judges[model]]
                return RayLauncher(spec, placement, OwnLocations(bundles, layout.judge_needs[model]))
            locations = SharedLocations(judge_keys(config)[model], spec.config.engine_ranks, gpu_actors)
            return RayLauncher(spec, placement, locations)

        return launch_judge

    def evaluation_launcher(self) -> Callable[[EngineSpec], Launcher] | None:
        """Return what starts engines that only evaluate in the reserved placement; None: they are on this machine."""
        placement = self._placement
        if placement is None:
            return None
        layout = placement.layout
        return lambda spec: RayLauncher(spec, placement, OwnLocations(layout.evaluation, layout.evaluation_needs))

    def runners(self) -> RayRunners | None:
        """Return what starts runner processes on all machines; None: they are on this one."""
        placement = self._placement
        return RayRunners(placement) if placement is not None and placement.spreads_runners else None

    @property
    def runner_cores(self) -> int:
        """Cores of the machines that runner processes are started on; 0: all are on this one."""
        return 0 if self._placement is None else self._placement.runner_cores

    async def learner(self) -> tuple[LearnerGroup, CriticGroup | None]:
        """Return the learner and its critic once they have loaded their weights."""
        return await (self._loaded or self._load()), self._critic

    def check(self) -> None:
        """Raise `LearnerError` if a rank of learner or critic, or a process of Ray, was lost. The learner has been returned."""
        for ranks in (self._started.result(), self._critic):
            if ranks is not None:
                ranks.check()

    async def aclose(self) -> None:
        """End the ranks and give the placement back."""
        await self._exits.aclose()

    async def _start(self) -> RayLearnerGroup:
        """Start the ranks. If Ray ends meanwhile, its call may wait for minutes: a daemon thread is left with it.

        Raises:
            LearnerError: a process of Ray has ended, or see `start_learners`.
        """
        started = asyncio.wrap_future(run_in_daemon_thread(self._start_ranks, "ranks"))
        while not (await asyncio.wait([started], timeout=LOOK_S))[0]:
            check_ray()
        return started.result()

    def _start_ranks(self) -> RayLearnerGroup:
        config, checkpoint = self.config, self.checkpoint
        critic = resolve_critic(config.algo, self.model)
        if critic is not None and checkpoint is not None:
            saved_critic = checkpoint / CRITIC / "model"
            if not is_sharded(saved_critic):
                critic = saved_critic
            if not saved_critic.is_dir():
                raise ConfigError(
                    f"algo.advantage.name={config.algo.advantage.name}: {checkpoint} has no critic; start a new run with "
                    f"model.path={checkpoint / 'model'}"
                )
        learner = start_learners(
            self.model,
            config.learner,
            config.algo,
            seed=config.run.seed,
            run_dir=self.folder,
            reference=self._reference(),
            trust_remote_code=config.model.trust_remote_code,
            cluster=self._placement
            or RayRuntime(
                cpus=config.learner.ranks * (1 if critic is None else 2), store_bytes=store_bytes(self.shape)
            ),
        )
        if critic is not None:
            self._critic = start_critic(
                critic,
                config.learner,
                config.algo,
                seed=config.run.seed,
                run_dir=self.folder,
                policy=learner,
                trust_remote_code=config.model.trust_remote_code,
                placement=self._placement,
            )
        return learner

    def _reference(self) -> Path | None:
        """Return the folder of the reference policy; the initial policy itself may not be written yet."""
        algo = self.config.algo
        is_initial = algo.needs_reference and algo.reference == str(self.model)
        return self.model if is_initial else resolve_reference(self.config)

    async def _load(self) -> RayLearnerGroup:
        learner = await asyncio.shield(self._started)
        await asyncio.gather(
            *(asyncio.to_thread(ranks.ready) for ranks in (learner, self._critic) if ranks is not None)
        )
        if self.checkpoint is not None:
            await asyncio.to_thread(learner.load, self.checkpoint)
            if self._critic is not None:
                await asyncio.to_thread(self._critic.load, self.checkpoint / CRITIC)
        return learner

    async def _close_placement(self, reserving: asyncio.Future[ReservedPlacement], cancelled: threading.Event) -> None:
        """Give the placement back, or end the wait for it, which may take minutes."""
        cancelled.set()
        try:
            placement = await reserving
        except Exception:
            return
        await asyncio.to_thread(placement.close)

    async def _close_ranks(self) -> None:
        """End the ranks, also if they still load, which may take minutes."""
        try:
            groups: list[RankActors] = [await self._started]
        except Exception:
            groups = []
        groups += [] if self._critic is None else [self._critic]
        if self._loaded is not None:
            if not self._loaded.done():
                for ranks in groups:
                    await asyncio.to_thread(ranks.end, "the run ends")
            await asyncio.gather(self._loaded, return_exceptions=True)  # then no thread uses Ray any more
        for ranks in reversed(groups):
            await asyncio.to_thread(ranks.close)
