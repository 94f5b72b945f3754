"""Weight sync by CUDA IPC: engines read the weights in the learner's memory on the GPU that both share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agentrl.core.errors import EngineError
from agentrl.inference.base import EngineControl
from agentrl.learner.base import LearnerGroup, WeightBucket
from agentrl.weight_sync.bucketwise import BucketwiseSync
from agentrl.weight_sync.engines import call_all


class IpcSync(BucketwiseSync):
    """Sends CUDA handles: an engine of ``g`` ranks with number ``e`` shares the GPUs of the learner's ranks from ``e * g``.

    The only copy is the one into the engine's weights.
    """

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
