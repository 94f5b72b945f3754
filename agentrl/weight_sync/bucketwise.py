"""Transports that send one bucket at a time: their base class, by value over HTTP, and by CUDA IPC."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from typing_extensions import override

from agentrl.config.schema import Config
from agentrl.core.errors import EngineError
from agentrl.distributed.sglang_loader import LOADERS
from agentrl.inference.base import EngineControl
from agentrl.learner.base import LearnerGroup, WeightBucket
from agentrl.weight_sync.base import SyncedWeights, Transport
from agentrl.weight_sync.engines import UpdateCheck, begin_updates, call_all, cancel_updates


class BucketwiseSync(Transport):
    """Sends one bucket at a time to all engines."""

    needs_all_ranks: ClassVar[bool] = False
    """Whether every rank of the learner must hold a bucket; else several ranks gather and send, each a part of the weights."""

    @override
    async def sync_weights(
        self, learner: LearnerGroup, engines: Sequence[EngineControl], version: int
    ) -> SyncedWeights:
        """Sync the weights bucket by bucket. The learner is called in threads, as its calls block.

        Raises:
            EngineError: an engine refused a bucket, died or did not answer in time, or the check afterwards fails.
        """
        check = await UpdateCheck.start(self.options.check, engines)
        try:
            await begin_updates(engines, version)
            gather = learner.buckets if self.needs_all_ranks else learner.buckets_by_sender
            buckets = gather(self.options.bucket_bytes, self.options.dtype)
            number = 0
            # A bucket is valid until the next one is requested.
            while (bucket := await asyncio.to_thread(next, buckets, None)) is not None:
                number += 1
                await check.add(bucket)
                await self._transfer(learner, engines, bucket, version, number)
        except BaseException:
            await self.aclose()
            await cancel_updates(engines)
            raise
        return await check.verify(engines, version)

    @abstractmethod
    async def _transfer(
        self, learner: LearnerGroup, engines: Sequence[EngineControl], bucket: WeightBucket, version: int, number: int
    ) -> None:
        """Transfer a bucket, with ``number`` from 1, to all engines; returns when all of them have it."""


class TensorSync(BucketwiseSync):
    """Transfers weights by value, which works between any two processes.

    A bucket goes to an engine once: its first tensor-parallel rank fetches it, and broadcasts it to the others. Engines that do
    not reach this machine get it in the body of a request. Engines that the run has not started may lack the loaders; they get
    it so once for each of these ranks.
    """

    engine_options = {"custom_weight_loader": [*LOADERS]}  # noqa: RUF012 - as declared by the base class

    async def _transfer(
        self, learner: LearnerGroup, engines: Sequence[EngineControl], bucket: WeightBucket, version: int, number: int
    ) -> None:
        named = await asyncio.to_thread(bucket.tensors)

        async def send(engine: EngineControl) -> None:
            await engine.updates.from_tensors(named, version, last=bucket.last, ranks=await engine.groups.ranks())

        await call_all(engines, f"weights of version {version}, bucket {number}", send)


class IpcSync(BucketwiseSync):
    """Sends CUDA handles: an engine of ``g`` ranks with number ``e`` shares the GPUs of the learner's ranks from ``e * g``.

    A learner of one rank shares its GPU with all engines. With ``placement.mode=separate`` that is the machine's only GPU, as
    `agentrl.cluster.placement_layout.check_placement` checks. The only copy is the one into the engine's weights. The memory of
    the bucket is not freed between syncs.
    """

    default_bucket_mib = 4096
    works_while_offloaded = False
    tensor_ranks_only = True
    needs_all_ranks = True

    @classmethod
    @override
    def faults(cls, config: Config) -> Iterator[str]:
        mode, ranks, engine_ranks = config.placement.mode, config.learner.ranks, config.sampler.engine_ranks
        if mode == "disaggregate":
            yield (
                f"weights.transport=ipc needs learner and engines on the same GPUs: set placement.mode=colocate, not {mode}"
            )
        elif config.sampler.device != "cuda" or config.learner.device == "cpu":
            yield "weights.transport=ipc is for GPUs, and engines or learner are on the CPU: set weights.transport=tensor"
        elif config.sampler.urls:
            yield (
                f"weights.transport=ipc with sampler.url={config.sampler.url}: the GPUs of running engines are not known; leave "
                "out sampler.url, or set another weights.transport"
            )
        elif mode == "separate" and max(ranks, engine_ranks) > 1:
            yield (
                f"weights.transport=ipc with placement.mode=separate is for a learner and engines of one GPU, the same for all; "
                f"learner.ranks={ranks}, and an engine has {engine_ranks} (sampler.sglang.tp_size, pp_size and dp_size): set "
                "placement.mode=colocate, or weights.transport=distributed"
            )
        else:
            yield from super().faults(config)

    async def _transfer(
        self, learner: LearnerGroup, engines: Sequence[EngineControl], bucket: WeightBucket, version: int, number: int
    ) -> None:
        handles = await asyncio.to_thread(bucket.ipc_handles)

        async def send(engine: EngineControl) -> None:
            ranks = await engine.groups.ranks()
            first = engine.number * ranks if len(handles) > 1 else 0
            if first + ranks > len(handles):
                raise EngineError(
                    f"it has {ranks} GPUs from the learner's rank {first} on, which has {len(handles)}: weights.transport="
                    "ipc wants placement.mode=colocate with at least as many learner.ranks as the engines have GPUs"
                )
            await engine.updates.from_handles(handles[first : first + ranks], version, last=bucket.last)

        await call_all(engines, f"weights of version {version}, bucket {number}", send)
