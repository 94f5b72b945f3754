"""Weight sync by CUDA IPC: engines read the weights in the learner's memory on the GPU that both share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from typing_extensions import override

from agentrl.config.schema import Config
from agentrl.core.errors import EngineError
from agentrl.inference.base import EngineControl
from agentrl.learner.base import LearnerGroup, WeightBucket
from agentrl.weight_sync.bucketwise import BucketwiseSync
from agentrl.weight_sync.engines import call_all


class IpcSync(BucketwiseSync):
    """Sends CUDA handles: an engine of ``g`` ranks with number ``e`` shares the GPUs of the learner's ranks from ``e * g``.

    The only copy is the one into the engine's weights. The memory of the bucket is not freed between syncs.
    """

    default_bucket_mib = 4096
    works_while_offloaded = False
    tensor_ranks_only = True

    @classmethod
    @override
    def faults(cls, config: Config) -> Iterator[str]:
        mode = config.placement.mode
        if mode != "colocate":
            yield (
                f"weights.transport=ipc needs learner and engines on the same GPUs: set placement.mode=colocate, not {mode}"
            )
        elif config.sampler.device != "cuda" or config.learner.device == "cpu":
            yield "weights.transport=ipc is for GPUs, and engines or learner are on the CPU: set weights.transport=tensor"
        else:
            yield from super().faults(config)

    async def _transfer(
        self, learner: LearnerGroup, engines: Sequence[EngineControl], bucket: WeightBucket, version: int, number: int
    ) -> None:
        handles = await asyncio.to_thread(bucket.ipc_handles)

        async def send(engine: EngineControl) -> None:
            ranks = await engine.groups.ranks()
            first = engine.number * ranks
            if first + ranks > len(handles):
                raise EngineError(
                    f"it has {ranks} GPUs from the learner's rank {first} on, which has {len(handles)}: weights.transport="
                    "ipc wants placement.mode=colocate with at least as many learner.ranks as the engines have GPUs"
                )
            await engine.updates.from_handles(handles[first : first + ranks], version, last=bucket.last)

        await call_all(engines, f"weights of version {version}, bucket {number}", send)
