"""``agentrl bench weights``: time of a weight sync to engines, by transport and bucket size."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, product
from pathlib import Path
from statistics import median
from typing import TypeVar, cast

import torch

from agentrl.config.sampler import SamplerConfig
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.launch.launcher import EngineSpec, launch, visible_gpus
from agentrl.inference.launch.processes import EngineProcess
from agentrl.learner.base import LearnerGroup, WeightBucket
from agentrl.learner.export import NamedTensors, WeightExporter
from agentrl.models.random_models import Shape, find_model_shape, parameter_shapes, write_random_model
from agentrl.models.resolve import resolve_model
from agentrl.weight_sync.base import TransportOptions
from agentrl.weight_sync.registry import TRANSPORTS, make_transport, with_engine_options
from benchmarks.copy_rate import Broadcast, copy_rate, synchronize

T = TypeVar("T")

_QUICK_START = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "skip_server_warmup": True,
    "max_total_tokens": 4096,
}
"""Options of SGLang: random weights need no file, and nothing is sampled, so no kernel is compiled."""
_SLOW_S = 5.0
_EMPTY_REQUESTS = 5
"""Requests of which the mean is the time of a request without weights."""


@dataclass(frozen=True, slots=True)
class WeightsBench:
    """Options of the benchmark; see the command."""

    sizes: Sequence[str]
    transports: Sequence[str]
    """Empty for all that this machine supports."""
    bucket_mib: Sequence[int | None]
    """None for ``weights.bucket_mib``, or the transport's default."""
    repeats: int
    folder: Path | None
    """Where ``disk`` writes; None: the temporary folder."""


@dataclass(frozen=True, slots=True)
class SyncTimes:
    """Times of one transport with one bucket size; medians."""

    size: str
    transport: str
    bucket_mib: int
    bytes: int
    """Size of all weights as sent."""
    seconds: float
    """The whole sync: pause the engine, gather, cast and send weights, check the version."""
    gather_s: float
    """Part of it until the buckets were complete; with ``distributed``, engines load the bucket before meanwhile."""
    send_s: float
    """Part of it from complete buckets until the engine had them."""
    pack_s: float
    """Part of ``send_s``: CUDA IPC handles (``ipc``), copies to the CPU (``tensor``), changes (``delta``), files (``disk``)."""
    request_s: float
    """As many requests to the engine as it had buckets, without weights."""
    plain: float | None
    """Baseline in bytes per second: a copy on the GPU for ``ipc``, a broadcast for ``distributed``."""

    @property
    def rate(self) -> float:
        """Bytes per second without gathering."""
        return self.bytes / self.send_s

    @property
    def load_s(self) -> float:
        """Rest of ``send_s``: transfer and load in the engines."""
        return max(self.send_s - self.pack_s - self.request_s, 0.0)


@dataclass(slots=True)
class Stopwatch:
    """Seconds of the parts of one sync."""

    gather_s: float = 0.0
    send_s: float = 0.0
    pack_s: float = 0.0
    """Of calls that pack a bucket, in any thread; those at the same time count once."""
    buckets: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _packing: int = 0
    """Calls in progress."""

    def packing(self, call: Callable[..., T]) -> Callable[..., T]:
        """Return ``call``, with its time counted in ``pack_s``."""

        def timed_call(*args: object) -> T:
            self._count(1)
            try:
                return call(*args)
            finally:
                self._count(-1)

        return timed_call

    def _count(self, change: int) -> None:
        with self._lock:
            # The first call's begin is subtracted, and the last one's end added.
            if self._packing == 0 or self._packing + change == 0:
                self.pack_s -= change * time.perf_counter()
            self._packing += change


class RandomLearner(WeightExporter):
    """Random weights in float32, as in a learner with one rank, with a stopwatch around gathering and sending."""

    def __init__(self, shape: Shape, device: torch.device, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        named = {
            name: torch.empty(sizes, device=device, dtype=torch.float32).normal_(0.0, 0.02, generator=generator)
            for name, sizes in parameter_shapes(shape).items()
        }
        super().__init__(NamedTensors(named))
        self.numbers = sum(tensor.numel() for tensor in named.values())
        self.watch = Stopwatch()
        """Of the last pass over the buckets."""
        self._named = named
        self.device = device

    def step(self, lr: float = 1e-6) -> None:
        """Change each weight by ``lr``, up or down, as AdamW does in one of its first steps."""
        for tensor in self._named.values():
            tensor.add_(torch.empty_like(tensor).bernoulli_(0.5).mul_(2 * lr).sub_(lr))

    def buckets(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[WeightBucket]:
        """Iterate over the weights; see `LearnerGroup.buckets`."""
        watch = self.watch = Stopwatch()
        buckets = super().buckets(bucket_bytes, dtype)
        while True:
            begun = time.perf_counter()
            bucket = next(buckets, None)
            synchronize(self.device)
            gathered = time.perf_counter()
            watch.gather_s += gathered - begun
            if bucket is None:
                return
            watch.buckets += 1
            for method in ("ipc_handles", "tensors", "save", "changes"):
                setattr(bucket, method, watch.packing(getattr(bucket, method)))
            yield bucket
            synchronize(self.device)
            watch.send_s += time.perf_counter() - gathered


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices of learner and engines."""

    gpus: Sequence[str]
    """GPUs of this machine. Empty: learner and engines are on the CPU."""
    engines: Sequence[Sequence[str]]
    """GPUs of each engine: the last ones."""

    @classmethod
    def find(cls, sampler: SamplerConfig, transports: Sequence[str]) -> Devices:
        """Return the devices of this machine.

        Raises:
            ConfigError: engines or a transport want GPUs that are not there.
        """
        gpus, ranks = visible_gpus() if sampler.device == "cuda" else [], sampler.engine_ranks
        count = sampler.engines * ranks
        if "ipc" in transports and not gpus:
            raise ConfigError("--transports=ipc: it is for engines on a GPU; leave it out")
        if not gpus:
            return cls([], [()] * sampler.engines)
        if count > len(gpus):
            raise ConfigError(
                f"sampler.engines={sampler.engines} of {ranks} GPUs each: this machine has {len(gpus)}; set fewer engines"
            )
        if "ipc" in transports and count > 1:
            raise ConfigError(
                f"--transports=ipc: the learner's one rank has the GPU of one engine, and engines have {count}; leave it out"
            )
        if "distributed" in transports and count == len(gpus):
            raise ConfigError(
                f"--transports=distributed: NCCL wants a GPU for the learner besides those of the engines, and all {count} are "
                "theirs; leave it out, or set fewer engines"
            )
        return cls(gpus, [gpus[first : first + ranks] for first in range(len(gpus) - count, len(gpus), ranks)])

    def learner(self, transport: str) -> torch.device:
        """Return the learner's device: the last engine's GPU, but another one for ``distributed``."""
        if not self.gpus:
            return torch.device("cpu")
        return torch.device("cuda", 0 if transport == "distributed" else len(self.gpus) - 1)

    def hold(self, engine: Shape, learner: Shape) -> bool:
        """Return whether the engine's GPU has memory for the engine of a model next to the learner of another one.

        The learner has float32 weights, and a bucket of at most all weights in bfloat16. A quarter of the memory is a reserve.
        """
        if not self.gpus:
            return False
        free = torch.cuda.mem_get_info(len(self.gpus) - 1)[0]
        return 2 * engine.parameters + 6 * learner.parameters < 0.75 * free


def transports_here(sampler: SamplerConfig) -> tuple[str, ...]:
    """Return the transports that can be measured on this machine, the fastest first."""
    gpus = len(visible_gpus()) if sampler.device == "cuda" else 0
    if not gpus:
        return ("distributed", "tensor", "disk", "delta")
    engine_gpus = sampler.engines * sampler.engine_ranks
    on_gpus = {"distributed": gpus > engine_gpus, "ipc": engine_gpus == 1}
    return (*(name for name, is_here in on_gpus.items() if is_here), "disk", "delta")


async def measure_weights(
    config: Config, bench: WeightsBench, progress: Callable[[str], None]
) -> AsyncIterator[SyncTimes]:
    """Start the engines of each size, the smallest first, and sync weights to them.

    The learner is one rank in this process: there is no other rank to gather from, and no Ray.

    Raises:
        ConfigError: a size or a transport is unknown, or not available here.
        EngineError: an engine does not start, or a sync failed.
    """
    sampler = _sampler(config.sampler)
    transports = bench.transports or transports_here(sampler)
    if unknown := set(transports) - set(TRANSPORTS):
        raise ConfigError(f"--transports: {', '.join(unknown)} is none of {', '.join(TRANSPORTS)}")
    for transport in transports:
        sampler = with_engine_options(sampler, transport)
    shapes = {size: find_model_shape(size) for size in bench.sizes}
    sizes = sorted(shapes, key=lambda size: shapes[size].parameters)
    devices = Devices.find(sampler, transports)
    async with AsyncExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="agentrl-bench-", dir=bench.folder)))
        config = config.model_copy(update={"sampler": sampler})
        source, with_weights = resolve_model(config.model.path), sampler.backend != "sglang"
        for size, shape in shapes.items():
            write_random_model(folder / size, shape, tokenizer=source, weights=with_weights)
        engines = _Engines(config, folder, devices.engines, progress)
        exits.push_async_callback(engines.aclose)
        engines.start(sizes[0])
        await asyncio.to_thread(parameter_shapes, shapes[sizes[0]])  # imports transformers meanwhile
        broadcast = None
        if "distributed" in transports:
            broadcast = exits.enter_context(
                await asyncio.to_thread(Broadcast, devices.learner("distributed"), next(iter(devices.gpus[-1:]), None))
            )
        measurement = _Measurement(config, bench, devices, broadcast, folder / "weights", progress)
        for size, next_size in zip(sizes, [*sizes[1:], None], strict=True):
            async with engines.use(size) as clients:
                if next_size is not None and devices.hold(shapes[next_size], shapes[size]):
                    engines.start(next_size)
                async for times in measurement.run(size, shapes[size], clients, transports):
                    yield times


class _Engines:
    """Engines of models. Those of one model may start while those of another one are used."""

    def __init__(
        self, config: Config, folder: Path, gpus: Sequence[Sequence[str]], progress: Callable[[str], None]
    ) -> None:
        """Start an engine on each entry of ``gpus``, with the models that are in ``folder`` by size."""
        self._config = config
        self._folder = folder
        self._gpus = gpus
        self._progress = progress
        self._starts: dict[str, list[asyncio.Task[EngineProcess]]] = {}

    def start(self, size: str) -> None:
        """Start the engines of a model in the background."""
        self._starts[size] = [
            asyncio.create_task(self._start(size, number, gpus)) for number, gpus in enumerate(self._gpus)
        ]

    async def _start(self, size: str, number: int, gpus: Sequence[str]) -> EngineProcess:
        self._progress(f"{size}: engine {number} starts")
        spec = EngineSpec(
            self._config.sampler, self._folder / size, self._folder / "logs" / size, self._config.run.seed
        )
        process = await launch(partial(spec.start, number, gpus=gpus), f"engine {number} of {size}")
        self._progress(f"{size}: engine {number} is healthy")
        return process

    @asynccontextmanager
    async def use(self, size: str) -> AsyncIterator[list[SGLangClient]]:
        """Yield clients of the engines of a model, which end afterwards."""
        if size not in self._starts:
            self.start(size)
        processes = await asyncio.gather(*self._starts[size])
        timeout_s = self._config.sampler.request_timeout_s
        clients = [SGLangClient(process.url, timeout_s=timeout_s) for process in processes]
        try:
            yield clients
        finally:
            await asyncio.gather(*(client.aclose() for client in clients))
            await self._stop(size)

    async def _stop(self, size: str) -> None:
        starts = self._starts.pop(size)
        for start in starts:
            start.cancel()
        for process in await asyncio.gather(*starts, return_exceptions=True):
            if not isinstance(process, BaseException):
                await asyncio.to_thread(process.stop)

    async def aclose(self) -> None:
        """Stop the engines that no one has used."""
        for size in [*self._starts]:
            await self._stop(size)


@dataclass(frozen=True, slots=True)
class _Measurement:
    """The syncs of the engines of one model after the other."""

    config: Config
    bench: WeightsBench
    devices: Devices
    broadcast: Broadcast | None
    """Baseline of ``distributed``."""
    folder: Path
    """Where ``disk`` writes."""
    progress: Callable[[str], None]

    async def run(
        self, size: str, shape: Shape, engines: Sequence[SGLangClient], transports: Sequence[str]
    ) -> AsyncIterator[SyncTimes]:
        """Measure all transports and sizes of buckets with the engines of a model."""
        version = 0
        for device, transports_there in groupby(transports, self.devices.learner):
            learner = RandomLearner(shape, device, self.config.run.seed)
            for transport, mib in product(transports_there, self.bench.bucket_mib):
                limit = TRANSPORTS[transport].bucket_bytes(mib or self.config.weights.bucket_mib)
                self.progress(f"{size}: {transport}, buckets of {limit >> 20} MiB")
                pushes = _Pushes(self.config, learner, engines, transport, limit, self.folder)
                repeats = 1 if transport == "disk" else self.bench.repeats
                runs = await pushes.run(version + 1, repeats, self.progress)
                version = pushes.version
                plain = await asyncio.to_thread(self._plain, transport, limit, pushes.bytes)
                seconds, *parts = (median(values) for values in zip(*runs, strict=True))
                gather_s, send_s, pack_s, request_s = parts
                yield SyncTimes(
                    size, transport, limit >> 20, pushes.bytes, seconds, gather_s, send_s, pack_s, request_s, plain
                )
            learner.leave_group()

    def _plain(self, transport: str, chunk: int, total: int) -> float | None:
        """Return the baseline; see `SyncTimes.plain`."""
        chunk = min(chunk, total)
        if transport == "distributed":
            assert self.broadcast is not None
            return self.broadcast.rate(chunk, total)
        return copy_rate(self.devices.learner(transport), chunk, total) if transport == "ipc" else None


class _Pushes:
    """Pushes with one transport and bucket size."""

    def __init__(
        self,
        config: Config,
        learner: RandomLearner,
        engines: Sequence[SGLangClient],
        transport: str,
        bucket_bytes: int,
        folder: Path,
    ) -> None:
        dtype = "bfloat16" if config.weights.dtype == "auto" else config.weights.dtype
        self.bytes = 0
        """Sent to each engine by the last sync."""
        self.version = 0
        """The last that was sent."""
        self._learner = learner
        self._engines = engines
        self._disk = transport == "disk"
        self._sync = make_transport(
            transport,
            TransportOptions(
                bucket_bytes=bucket_bytes,
                folder=folder,
                dtype=dtype,
                check=config.weights.check,
                backend="nccl" if learner.device.type == "cuda" else "gloo",
                timeout_s=config.sampler.request_timeout_s,
            ),
        )

    async def run(self, version: int, repeats: int, progress: Callable[[str], None]) -> list[tuple[float, ...]]:
        """Sync ``repeats`` times after a warm-up sync (none for ``disk``). Slow syncs are shown as ``progress``.

        Returns:
            seconds in all, of gathering, sending, packing, and of requests without weights.
        """
        runs = []
        try:
            for number in range(repeats + (not self._disk)):
                self.version = version + number
                runs.append(await self._push(self.version))
                if runs[-1][0] > _SLOW_S:
                    progress(f"sync {number + 1} took {runs[-1][0]:.1f} s")
        finally:
            await self._sync.aclose()
        return runs[-repeats:]

    async def _push(self, version: int) -> tuple[float, ...]:
        # It has the part of a learner that a sync needs.
        learner = cast("LearnerGroup", self._learner)
        self._learner.step()
        begun = time.perf_counter()
        self.bytes = (await self._sync.sync_weights(learner, self._engines, version)).bytes
        seconds = time.perf_counter() - begun
        watch = self._learner.watch
        # The engine reads files after the last one is written, with one request.
        sent = seconds - watch.gather_s if self._disk else watch.send_s
        requests = 1 if self._disk else watch.buckets
        begun = time.perf_counter()
        for _ in range(_EMPTY_REQUESTS):
            await asyncio.gather(*(engine.healthy() for engine in self._engines))
        request_s = (time.perf_counter() - begun) / _EMPTY_REQUESTS
        return seconds, watch.gather_s, sent, watch.pack_s, requests * request_s


def _sampler(sampler: SamplerConfig) -> SamplerConfig:
    """Return the engine configuration, with minimal options for SGLang.

    Raises:
        ConfigError: ``sampler.url`` is set.
    """
    if sampler.urls:
        raise ConfigError(f"sampler.url={sampler.url}: the benchmark starts its own engines; leave out sampler.url")
    quick_start = _QUICK_START if sampler.backend == "sglang" else {}
    return sampler.model_copy(update={"sglang": {**quick_start, **sampler.sglang}})
