"""The weights of a run's engines: synced after each step, after restarts and for evaluations; and which side holds GPU memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from agentrl.cluster.ray_address import learner_device
from agentrl.config.engine_groups import evaluation_group, training_gpus
from agentrl.config.judges import judge_sampler
from agentrl.config.schema import Config
from agentrl.config.train import WeightsConfig
from agentrl.core.errors import ConfigError, EngineError
from agentrl.inference.base import EngineControl
from agentrl.inference.fleet.fleet import Fleet, call_live
from agentrl.inference.fleet.reserved_engines import reserved_fleet
from agentrl.inference.fleet.time_sharing import EngineTimeSharing
from agentrl.inference.launch.launcher import EngineSpec, Launcher
from agentrl.learner.base import CriticGroup, LearnerGroup
from agentrl.models.engine_float8 import DTYPE as FLOAT8
from agentrl.models.engine_float8 import engine_overrides
from agentrl.obs.progress import Stopwatch
from agentrl.runtime.engine_gap import gap_band
from agentrl.runtime.engine_precision import check_random_start, read_precision
from agentrl.runtime.services import Services
from agentrl.train.first_sync import FirstSyncCheck
from agentrl.weight_sync.adapter import AdapterSync
from agentrl.weight_sync.base import SyncedWeights, TransportOptions, WeightSync
from agentrl.weight_sync.engines import paused
from agentrl.weight_sync.registry import make_transport, transport_class


class SeparateGpus:
    """Learner and engines have separate GPUs, and the learner keeps its memory."""

    shared: ClassVar[bool] = False
    """Whether learner and engines use the same GPUs."""

    def __init__(self, judges: EngineTimeSharing | None = None) -> None:
        """Create it; ``judges`` share the GPUs of the policy's engines."""
        self.critic: CriticGroup | None = None
        self._judges = judges

    async def switch_to_learner(self, learner: LearnerGroup, watch: Stopwatch) -> None:
        """Do nothing: the learner keeps its memory."""

    async def switch_to_engines(
        self, learner: LearnerGroup, sync: Callable[[], Awaitable[None]], watch: Stopwatch, *, due: bool
    ) -> None:
        """Sync the weights if that is ``due``; ``watch`` gets the seconds as ``sync``."""
        if due:
            with watch("sync"):
                await sync()

    async def prepare_sync(self) -> None:
        """Let the policy's engines have their GPUs, if those of judges have them."""
        if self._judges is not None:
            await self._judges.give_to_policy()

    def restarts(self, learner_lock: asyncio.Lock) -> AbstractAsyncContextManager[None] | None:
        """Return the context in which engines of the policy are restarted; None: at once."""
        return None


class GpuTimeSharing:
    """Switches the GPUs between learner and engines. Initially both may hold memory, or the learner may be offloaded."""

    shared: ClassVar[bool] = True

    def __init__(
        self,
        fleet: Fleet,
        cut: Literal["abort", "restart"] | None = None,
        judges: EngineTimeSharing | None = None,
    ) -> None:
        """Share with the engines of ``fleet``, none of which may be restarted while the learner holds the GPUs.

        Args:
            fleet: the policy's engines.
            cut: what becomes of generations in progress when the learner gets the GPUs; see `EngineMemory.release`.
            judges: share the GPUs, too.
        """
        self._fleet = fleet
        self._cut = cut
        self._judges = judges
        self._learner_active = False
        self.critic: CriticGroup | None = None
        """It holds GPU memory while the learner trains."""

    async def switch_to_learner(self, learner: LearnerGroup, watch: Stopwatch) -> None:
        """Release the engines' memory and wake the learner; ``watch`` gets the seconds as ``wake``.

        Returns at once if the learner is active already.

        Raises:
            EngineError: a live engine keeps its memory.
            LearnerError: there is not enough memory for the learner, or a rank failed.
        """
        if self._learner_active:
            return
        with watch("wake"):
            if self._judges is not None:
                await self._judges.give_to_learner()
            await call_live(self._fleet, lambda engine: engine.memory.release(self._cut))
            await self._fleet.wait_ended()
            for group in (learner, self.critic):
                if group is not None:
                    await asyncio.to_thread(group.wake)
        self._learner_active = True

    async def switch_to_engines(
        self, learner: LearnerGroup, sync: Callable[[], Awaitable[None]], watch: Stopwatch, *, due: bool = True
    ) -> None:
        """Offload the critic, sync the weights while learner and engines both hold theirs, offload the learner, and restore
        KV caches.

        The weights are synced also if that is not ``due``: engines release theirs.

        ``watch`` gets the seconds of ``sync`` as ``sync`` and all others as ``sleep``.

        Raises:
            EngineError: a live engine does not restore its memory or does not take the weights.
            LearnerError: a rank failed.
        """
        await self.switch_to_learner(learner, watch)
        with watch("sleep"):
            if self.critic is not None:
                await asyncio.to_thread(self.critic.sleep)
            await call_live(self._fleet, lambda engine: engine.memory.resume("weights"))
        with watch("sync"):
            await sync()
        with watch("sleep"):
            await asyncio.to_thread(learner.sleep)
            await call_live(self._fleet, lambda engine: engine.memory.resume("kv_cache"))
            if self._judges is not None:
                await self._judges.return_from_learner()
        self._learner_active = False

    async def prepare_sync(self) -> None:
        """Do nothing: a sync is a part of `switch_to_engines`."""

    def restarts(self, learner_lock: asyncio.Lock) -> AbstractAsyncContextManager[None] | None:
        """Return the context in which engines of the policy are restarted: the learner has released its memory."""
        return learner_lock if self._judges is None else self._judges.policy_restarts(learner_lock)


def open_gpus(config: Config, fleet: Fleet, judges: EngineTimeSharing | None = None) -> GpuTimeSharing | SeparateGpus:
    """Return how learner and engines of a run use GPUs; engines of ``judges`` share those of the policy's."""
    if not config.placement.shares_gpus:
        return SeparateGpus(judges)
    cut = config.weights.pause if config.asynchronous.max_staleness else None
    assert cut is None or cut in ("abort", "restart"), "check_placement comes first"
    return GpuTimeSharing(fleet, cut, judges)


Engines = Sequence[EngineControl]


@dataclass(frozen=True, slots=True)
class EvalEngines:
    """Engines that only evaluate. They get weights when an evaluation begins, and keep them until the next."""

    fleet: Fleet
    sync: WeightSync


@dataclass(slots=True)
class EngineWeights:
    """Syncs the learner's weights to the engines.

    A restarted engine gets the learner's weights while episodes run: only then is the learner idle and at the end of a
    whole step. With GPU time sharing, the engine is also started only then.
    """

    config: WeightsConfig
    fleet: Fleet
    """The engines of training."""
    sync: WeightSync
    gpus: GpuTimeSharing | SeparateGpus
    restart_sync: WeightSync | None = None
    """Syncs weights to restarted engines, if ``sync`` cannot while the learner is offloaded."""
    eval_engines: EvalEngines | None = None
    """None: those of training evaluate."""
    first_sync: FirstSyncCheck | None = None
    """Compares engines and learner once, after the first sync. Where they share GPUs, they switch once more for it."""
    version: int = field(default=0, init=False)
    """Policy version of the learner's weights."""
    learner_lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held by the user of the learner: by the trainer, except while episodes run."""
    on_synced: Callable[[int], None] = field(default=lambda _: None, init=False)
    """Called with the version that the engines of training have received."""
    _learner: LearnerGroup | None = field(default=None, init=False)
    _synced: int | None = field(default=None, init=False)
    """Policy version of the engines of training."""
    _last_sync: SyncedWeights | None = field(default=None, init=False)
    metrics: dict[str, float] = field(default_factory=dict, init=False)
    """Metrics of the last sync, and of the check after the first one."""
    _gap: dict[str, float] = field(default_factory=dict, init=False)
    """Metrics of the check after the first sync, until the next one."""
    _generating: int = field(default=0, init=False)
    """Open `generating` contexts."""

    async def open(self) -> None:
        """Connect to the fleets' restarts; the trainer has exclusive use of the learner from here on."""
        await self.learner_lock.acquire()
        sync = self.restart_sync or self.sync
        if (context := self.gpus.restarts(self.learner_lock)) is not None:
            self.fleet.set_weight_sync(partial(self._sync_restarted_engine, sync), launch_in=context)
        else:
            self.fleet.set_weight_sync(partial(self._lock_and_sync_restarted, sync))
        if self.eval_engines is not None:
            self.eval_engines.fleet.set_weight_sync(partial(self._lock_and_sync_restarted, self.eval_engines.sync))

    async def sync_weights(self, learner: LearnerGroup, version: int, watch: Stopwatch, *, samples: bool) -> None:
        """Sync the weights to all engines of training, or only every ``weights.sync_every`` versions.

        Engines that share no GPU with the learner get none if nothing ``samples`` with them.

        Raises:
            EngineError: a live engine did not take them.
        """
        self._learner, self.version = learner, version
        due = samples and (self._synced is None or version - self._synced >= self.config.sync_every)
        check = self.first_sync if due else None
        sync = partial(self._sync_engines, watch)
        await self.gpus.switch_to_engines(learner, sync, watch, due=due)
        if check is not None:
            self.first_sync = None
            with watch("sync"):
                await check.sample(self.fleet.live)
            await self.gpus.switch_to_learner(learner, watch)
            with watch("sync"):
                await asyncio.to_thread(check.score_learner, learner)
            await self.gpus.switch_to_engines(learner, sync, watch, due=False)
            with watch("sync"):
                self._gap = await check.compare(learner, self.fleet.live, version)

    async def sync_for_evaluation(self) -> None:
        """Sync the newest weights to the engines that evaluate, unless they have them: see `sync_weights`."""
        if self.eval_engines is not None:
            await self._sync_fleet(self.eval_engines.fleet, self.eval_engines.sync, lambda _: nullcontext())
        elif self._synced != self.version:
            await self._sync_engines(Stopwatch())

    async def _sync_engines(self, watch: Stopwatch) -> None:
        await self.gpus.prepare_sync()
        synced = await self._sync_fleet(self.fleet, self.sync, partial(self._pause_generations, watch))
        if synced is not None:
            unchanged = self._last_sync is not None and self._last_sync.fingerprint == synced.fingerprint
            self._last_sync = synced
            self.metrics = {"sync/mib": synced.bytes / 2**20, "sync/unchanged": float(unchanged)} | self._gap
            self._gap = {}
        self._synced = self.version
        self.on_synced(self.version)

    async def _sync_fleet(
        self, fleet: Fleet, sync: WeightSync, around: Callable[[Engines], AbstractAsyncContextManager[None]]
    ) -> SyncedWeights | None:
        """Sync the weights to the live engines of a fleet, if there are any; ``around`` is entered with these engines."""
        assert self._learner is not None, "call sync_weights first"
        while engines := fleet.live:
            try:
                async with around(engines):
                    return await sync.sync_weights(self._learner, engines, self.version)
            except EngineError:
                await fleet.check_now()
                if set(engines) <= set(fleet.live):
                    raise
                # One engine is lost. It gets the weights after its restart; all others get them again.
        return None

    @asynccontextmanager
    async def _pause_generations(self, watch: Stopwatch, engines: Engines) -> AsyncIterator[None]:
        """Pause the generations in progress for a weight sync, unless they are to end first; ``watch`` gets the seconds."""
        # With shared GPUs generations were cut when the learner got the GPUs.
        if self.gpus.shared or not self._generating or self.config.pause == "finish":
            yield
            return
        with watch("pause"):
            async with paused(engines, self.config.pause):
                yield

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Declare that the body's generations run on the engines of training, so that a weight sync pauses them."""
        self._generating += 1
        try:
            yield
        finally:
            self._generating -= 1

    async def _lock_and_sync_restarted(self, sync: WeightSync, engine: EngineControl) -> int:
        async with self.learner_lock:
            return await self._sync_restarted_engine(sync, engine)

    async def _sync_restarted_engine(self, sync: WeightSync, engine: EngineControl) -> int:
        """Sync the newest weights to a restarted engine and return their version; the caller holds the learner."""
        assert self._learner is not None, "episodes run only after the first sync"
        await sync.sync_weights(self._learner, [engine], self.version)
        return self.version

    @asynccontextmanager
    async def learner_idle(self) -> AsyncIterator[None]:
        """Let restarted engines use the learner in the body."""
        self.learner_lock.release()
        try:
            yield
        finally:
            await self.learner_lock.acquire()


async def open_engine_weights(
    config: Config,
    folder: Path,
    model: Path,
    services: Services,
    dtype: str | None,
    exits: AsyncExitStack,
    launcher: Callable[[EngineSpec], Launcher] | None = None,
) -> EngineWeights:
    """Return the weights of a run's engines, with those that only evaluate, which are started by ``launcher``; ``exits`` ends
    them.

    Engines load ``model`` first, and weights are sent in ``dtype``; see `sent_dtype`.

    Raises:
        EngineError: an engine does not start; the message has its last log lines.
    """
    transport = config.weights.transport
    sync = _open_sync(config, folder, transport, dtype)
    exits.push_async_callback(sync.aclose)
    first_sync, band = None, gap_band(config, await asyncio.to_thread(read_precision, config, model), dtype)
    # An engine with several adapters scores with none of them.
    if band is not None and (config.learner.lora is None or config.weights.adapters == "merged"):
        checksums = config.model_copy(update={"weights": config.weights.model_copy(update={"check": "checksum"})})
        resend = _open_sync(checksums, folder, "tensor", dtype)
        vocabulary = services.fleet.vocabulary
        first_sync = FirstSyncCheck.open(config, model, services.renderer, band, vocabulary, resend, dtype)
    return EngineWeights(
        config.weights,
        services.fleet,
        sync,
        open_gpus(config, services.fleet, services.time_sharing),
        restart_sync=(
            _open_sync(config, folder, "tensor", dtype)
            if config.placement.shares_gpus and not transport_class(transport).works_while_offloaded
            else None
        ),
        eval_engines=await open_eval_engines(config, folder, model, services, exits, launcher),
        first_sync=first_sync,
    )


async def open_eval_engines(
    config: Config,
    folder: Path,
    model: Path,
    services: Services,
    exits: AsyncExitStack,
    launcher: Callable[[EngineSpec], Launcher] | None = None,
) -> EvalEngines | None:
    """Start the engines that only evaluate, if there are any, which ``exits`` ends; see `open_engine_weights`."""
    group = evaluation_group(config.sampler)
    if group is None:
        return None
    name, sampler = group
    opponents = 0 if config.self_play is None else config.self_play.snapshot_engines
    judges = sum(model.config.engines for model in services.judge_models.values())
    logs, number = folder / "logs" / name, len(services.frozen) + opponents + judges
    # Each of these has the size of the run's own.
    common_engines = len(config.algo.distillation.teachers) + len(services.frozen) + opponents
    gpus = training_gpus(config.sampler) + common_engines * config.sampler.engine_ranks
    gpus += sum(
        model.config.engines * judge_sampler(config, model.config).engine_ranks
        for model in services.judge_models.values()
    )
    fleet = reserved_fleet(
        config,
        model,
        logs,
        number,
        services.fleet.vocabulary,
        engines=sampler.engines,
        sampler=sampler,
        launcher=launcher,
        overrides=started_overrides(config, model),
        first_gpu=gpus,
        group=name,
    )
    exits.push_async_callback(fleet.aclose)
    await fleet.start()
    transport = config.weights.transport
    if config.placement.shares_gpus and not transport_class(transport).works_while_offloaded:
        transport = "tensor"  # they get weights also while the learner is offloaded
    sync = _open_sync(config, folder, transport, await sent_dtype(config.weights, fleet))
    exits.push_async_callback(sync.aclose)
    services.reserved.append(fleet)
    return EvalEngines(fleet, sync)


def started_overrides(config: Config, folder: Path) -> dict[str, object] | None:
    """Return what SGLang engines that a run starts from ``folder`` read in place of entries of its ``config.json``.

    Raises:
        ConfigError: see `agentrl.models.engine_float8.engine_overrides` and `check_random_start`.
    """
    starts = config.sampler.uses_sglang and not config.sampler.urls
    overrides = engine_overrides(config.weights.dtype, folder) if starts else None
    if overrides is not None:
        check_random_start(config)
    return overrides


async def sent_dtype(config: WeightsConfig, fleet: Fleet) -> str | None:
    """Return the dtype in which weights are sent; None for the learner's.

    Raises:
        ConfigError: engines have other weights than ``weights.dtype``, quantised in a way that is not sent, or only some of
            them in float8.
    """
    dtypes = set(await asyncio.gather(*(engine.dtype() for engine in fleet.live)))
    dtype = FLOAT8 if config.dtype == "float8" else config.dtype
    if FLOAT8 in (*dtypes, dtype) and dtypes != {FLOAT8 if dtype == "auto" else dtype}:
        dtype_names = ", ".join(sorted(str(name) for name in dtypes))
        raise ConfigError(
            f"weights.dtype={config.dtype}, and the engines have weights of {dtype_names}: set weights.dtype=auto, and start all "
            "engines from one folder with the same options"
        )
    if dtype != "auto":
        return dtype
    return dtypes.pop() if len(dtypes) == 1 else None


def _open_sync(config: Config, folder: Path, transport: str, dtype: str | None) -> WeightSync:
    if config.learner.lora is not None and config.weights.adapters == "only":
        return AdapterSync(config.learner.lora, dtype=dtype, check=config.weights.check)
    gpus = config.sampler.device == learner_device(config.learner) == "cuda"
    options = TransportOptions(
        bucket_bytes=transport_class(transport).bucket_bytes(config.weights.bucket_mib),
        folder=folder / "weights",
        dtype=dtype,
        check=config.weights.check,
        backend="nccl" if gpus else "gloo",
        timeout_s=config.sampler.request_timeout_s,
    )
    return make_transport(transport, options)
