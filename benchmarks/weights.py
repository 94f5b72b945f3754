"""``agentrl bench weights``: time of a weight sync to an engine, by transport and bucket size."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar, cast

import torch

from agentrl.config.sampler import SamplerConfig
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.launch.launcher import EngineSpec, visible_gpus
from agentrl.inference.launch.processes import EngineProcess
from agentrl.learner.base import LearnerGroup, WeightBucket
from agentrl.learner.export import NamedTensors, WeightExporter
from agentrl.models.random_models import Shape, find_model_shape, parameter_shapes, write_random_model
from agentrl.models.resolve import resolve_model
from agentrl.weight_sync.base import TransportOptions
from agentrl.weight_sync.registry import TRANSPORTS, make_transport, with_engine_options
from benchmarks.copy_rate import Broadcast, copy_rate, synchronize

T = TypeVar("T")

_MADE_UP = {"load_format": "dummy", "skip_tokenizer_init": True, "disable_cuda_graph": True, "max_total_tokens": 4096}
"""Options of SGLang: random weights need no file, and nothing is sampled."""
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
        """Rest of ``send_s``: transfer and load in the engine."""
        return max(self.send_s - self.pack_s - self.request_s, 0.0)


@dataclass(slots=True)
class Stopwatch:
    """Seconds of the parts of one sync."""

    gather_s: float = 0.0
    send_s: float = 0.0
    pack_s: float = 0.0
    buckets: int = 0

    def packing(self, call: Callable[..., T]) -> Callable[..., T]:
        """Return ``call``, with its time added to ``pack_s``."""

        def timed_call(*args: object) -> T:
            begun = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.pack_s += time.perf_counter() - begun

        return timed_call


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
        self._device = device

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
            synchronize(self._device)
            gathered = time.perf_counter()
            watch.gather_s += gathered - begun
            if bucket is None:
                return
            watch.buckets += 1
            for method in ("ipc_handles", "tensors", "save", "changes"):
                setattr(bucket, method, watch.packing(getattr(bucket, method)))
            yield bucket
            synchronize(self._device)
            watch.send_s += time.perf_counter() - gathered


@dataclass(frozen=True, slots=True)
class _Devices:
    """Devices of learner and engines."""

    device: torch.device
    """The learner's."""
    shared: Sequence[str]
    """GPUs of engines that share the learner's GPU; empty on a CPU."""
    apart: Sequence[str]
    """GPUs of engines with a separate GPU."""

    @classmethod
    def find(cls, sampler: SamplerConfig, transports: Sequence[str]) -> _Devices:
        """Return the devices of this machine.

        Raises:
            ConfigError: a transport wants GPUs that are not there.
        """
        gpus = visible_gpus() if sampler.device == "cuda" else []
        if "ipc" in transports and not gpus:
            raise ConfigError("--transports=ipc: it is for engines on a GPU; leave it out")
        if "distributed" in transports and len(gpus) == 1:
            raise ConfigError("--transports=distributed: NCCL wants two GPUs, and there is one; leave it out")
        return cls(torch.device("cuda:0" if gpus else "cpu"), gpus[:1], gpus[-1:])

    @property
    def backend(self) -> str:
        """Of the group that ``distributed`` sends through."""
        return "nccl" if self.device.type == "cuda" else "gloo"


def transports_here(sampler: SamplerConfig) -> tuple[str, ...]:
    """Return the transports that can be measured on this machine."""
    gpus = len(visible_gpus()) if sampler.device == "cuda" else 0
    if not gpus:
        return ("distributed", "tensor", "delta", "disk")
    return ("ipc", "distributed", "delta", "disk") if gpus > 1 else ("ipc", "delta", "disk")


async def measure_weights(
    config: Config, bench: WeightsBench, progress: Callable[[str], None]
) -> AsyncIterator[SyncTimes]:
    """Start an engine for each size and place, and sync weights to it.

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
    devices = _Devices.find(sampler, transports)
    async with AsyncExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="agentrl-bench-", dir=bench.folder)))
        source, with_weights = resolve_model(config.model.path), sampler.backend != "sglang"
        for size, shape in shapes.items():
            write_random_model(folder / size, shape, tokenizer=source, weights=with_weights)
        config = config.model_copy(update={"sampler": sampler})
        engines = await _start(config, folder, bench.sizes, devices, transports, exits, progress)
        broadcast = exits.enter_context(_broadcast(devices)) if "distributed" in transports else None
        versions = dict.fromkeys(engines, 0)
        for size, shape in shapes.items():
            learner = RandomLearner(shape, devices.device, config.run.seed)
            for transport in transports:
                key = size, _apart(transport, devices)
                for mib in bench.bucket_mib:
                    limit = TRANSPORTS[transport].bucket_bytes(mib or config.weights.bucket_mib)
                    progress(f"{size}: {transport}, buckets of {limit >> 20} MiB")
                    pushes = _Pushes(config, learner, engines[key], transport, limit, folder / "weights", devices)
                    runs = await pushes.run(versions[key] + 1, 1 if transport == "disk" else bench.repeats)
                    versions[key] = pushes.version
                    plain = await asyncio.to_thread(_plain, transport, limit, pushes.bytes, devices, broadcast)
                    seconds, *parts = (median(values) for values in zip(*runs, strict=True))
                    gather_s, send_s, pack_s, request_s = parts
                    yield SyncTimes(
                        size, transport, limit >> 20, pushes.bytes, seconds, gather_s, send_s, pack_s, request_s, plain
                    )
            learner.leave_group()


class _Pushes:
    """Pushes with one transport and bucket size."""

    def __init__(
        self,
        config: Config,
        learner: RandomLearner,
        engine: SGLangClient,
        transport: str,
        bucket_bytes: int,
        folder: Path,
        devices: _Devices,
    ) -> None:
        dtype = "bfloat16" if config.weights.dtype == "auto" else config.weights.dtype
        self.bytes = 0
        """Sent to the engine by the last sync."""
        self.version = 0
        """The last that was sent."""
        self._learner = learner
        self._engine = engine
        self._disk = transport == "disk"
        self._sync = make_transport(
            transport,
            TransportOptions(
                bucket_bytes=bucket_bytes,
                folder=folder,
                dtype=dtype,
                check=config.weights.check,
                backend=devices.backend,
                timeout_s=config.sampler.request_timeout_s,
            ),
        )

    async def run(self, version: int, repeats: int) -> list[tuple[float, ...]]:
        """Sync ``repeats`` times after a warm-up sync (none for ``disk``).

        Returns:
            seconds in all, of gathering, sending, packing, and of requests without weights.
        """
        runs = []
        try:
            for number in range(repeats + (not self._disk)):
                self.version = version + number
                runs.append(await self._push(self.version))
        finally:
            await self._sync.aclose()
        return runs[-repeats:]

    async def _push(self, version: int) -> tuple[float, ...]:
        # It has the part of a learner that a sync needs.
        learner = cast("LearnerGroup", self._learner)
        self._learner.step()
        begun = time.perf_counter()
        self.bytes = (await self._sync.sync_weights(learner, [self._engine], version)).bytes
        seconds = time.perf_counter() - begun
        watch = self._learner.watch
        # The engine reads files after the last one is written, with one request.
        sent = seconds - watch.gather_s if self._disk else watch.send_s
        requests = 1 if self._disk else watch.buckets
        begun = time.perf_counter()
        for _ in range(_EMPTY_REQUESTS):
            await self._engine.healthy()
        request_s = (time.perf_counter() - begun) / _EMPTY_REQUESTS
        return seconds, watch.gather_s, sent, watch.pack_s, requests * request_s


async def _start(
    config: Config,
    folder: Path,
    sizes: Sequence[str],
    devices: _Devices,
    transports: Sequence[str],
    exits: AsyncExitStack,
    progress: Callable[[str], None],
) -> dict[tuple[str, bool], SGLangClient]:
    """Start all engines concurrently; return their clients by size and by whether they have a separate GPU."""
    keys = [
        (size, apart) for size in sizes for apart in sorted({_apart(transport, devices) for transport in transports})
    ]
    progress(f"starting {len(keys)} engine(s)")

    async def start(size: str, apart: bool) -> EngineProcess:
        spec = EngineSpec(config.sampler, folder / size, folder / "logs" / f"{size}-{apart}", config.run.seed)
        return await asyncio.to_thread(spec.start, 0, gpus=devices.apart if apart else devices.shared)

    results = await asyncio.gather(*(start(*key) for key in keys), return_exceptions=True)
    clients = {}
    for key, result in zip(keys, results, strict=True):
        if not isinstance(result, BaseException):
            exits.push_async_callback(asyncio.to_thread, result.stop)
            clients[key] = SGLangClient(result.url, timeout_s=config.sampler.request_timeout_s)
            exits.push_async_callback(clients[key].aclose)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return clients


def _apart(transport: str, devices: _Devices) -> bool:
    """Return whether the engine has a separate GPU; on a CPU there is only one place."""
    return transport == "distributed" and devices.device.type == "cuda"


def _broadcast(devices: _Devices) -> Broadcast:
    return Broadcast(devices.device, devices.apart[0] if devices.apart else None)


def _plain(transport: str, chunk: int, total: int, devices: _Devices, broadcast: Broadcast | None) -> float | None:
    chunk = min(chunk, total)
    if transport == "distributed":
        assert broadcast is not None
        return broadcast.rate(chunk, total)
    return copy_rate(devices.device, chunk, total) if transport == "ipc" else None


def _sampler(sampler: SamplerConfig) -> SamplerConfig:
    """Return the engine configuration, with minimal options for SGLang.

    Raises:
        ConfigError: ``sampler.url`` is set.
    """
    if sampler.urls:
        raise ConfigError(f"sampler.url={sampler.url}: the benchmark starts its own engines; leave out sampler.url")
    random_weights = _MADE_UP if sampler.backend == "sglang" else {}
    return sampler.model_copy(update={"sglang": {**random_weights, **sampler.sglang}})
