"""Weight sync through a folder that learner and engines share."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from typing_extensions import override

from agentrl.core.atomic_files import names_file
from agentrl.distributed.flat_bucket import total_bytes
from agentrl.inference.base import EngineControl
from agentrl.learner.base import LearnerGroup, WeightBucket
from agentrl.models.weight_files import INDEX
from agentrl.weight_sync.base import SyncedWeights, Transport
from agentrl.weight_sync.engines import UpdateCheck, call_all


class DiskSync(Transport):
    """The learner's rank 0 writes one safetensors file per bucket, and the engines read them; then they are deleted.

    The folder of the options is the parent of the written folders; memory-backed for speed.
    """

    @override
    async def sync_weights(
        self, learner: LearnerGroup, engines: Sequence[EngineControl], version: int
    ) -> SyncedWeights:
        """Write the weights and let the engines load them.

        Raises:
            EngineError: an engine could not load them, or the check afterwards fails.
        """
        folder = self.options.folder / f"version_{version:06d}"
        check = await UpdateCheck.start(self.options.check, engines)

        async def load(engine: EngineControl) -> None:
            await engine.updates.from_disk(folder, version)

        try:
            await write_weights(
                learner, folder, bucket_bytes=self.options.bucket_bytes, dtype=self.options.dtype, on_bucket=check.add
            )
            await call_all(engines, f"weights of version {version} from {folder}", load)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder)
        return await check.verify(engines, version)


async def write_weights(
    learner: LearnerGroup,
    folder: Path,
    *,
    bucket_bytes: int,
    dtype: str | None = None,
    on_bucket: Callable[[WeightBucket], Awaitable[None]] | None = None,
) -> None:
    """Write the learner's weights to a folder that engines load, one safetensors file a bucket; what it held is removed.

    Args:
        learner: of the weights.
        folder: created.
        bucket_bytes: size of a file.
        dtype: weights are cast to it; None keeps the learner's dtype.
        on_bucket: called with each bucket.
    """
    await asyncio.to_thread(_create_empty, folder)
    file_by_name: dict[str, str] = {}
    size = 0
    buckets = learner.buckets(bucket_bytes, dtype)
    while (bucket := await asyncio.to_thread(next, buckets, None)) is not None:
        file = f"model-{len(file_by_name):05d}.safetensors"
        await asyncio.to_thread(bucket.save, folder / file)
        if on_bucket is not None:
            await on_bucket(bucket)
        file_by_name |= {spec.name: file for spec in bucket.specs}
        size += total_bytes(*bucket.specs)
    index = {"metadata": {"total_size": size}, "weight_map": file_by_name}
    with names_file(folder / INDEX):
        (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


def _create_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
