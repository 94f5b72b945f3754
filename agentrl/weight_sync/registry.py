"""The transports that ``weights.transport`` chooses from."""

from __future__ import annotations

from pathlib import Path

from agentrl.weight_sync.base import WeightSync
from agentrl.weight_sync.disk import DiskSync
from agentrl.weight_sync.distributed import DistributedSync
from agentrl.weight_sync.ipc import IpcSync
from agentrl.weight_sync.tensor import TensorSync

TRANSPORTS = ("tensor", "disk", "distributed", "ipc")
"""What ``weights.transport`` may be."""


def make_sync(
    transport: str,
    *,
    bucket_bytes: int,
    folder: Path,
    dtype: str | None = None,
    check: str = "version",
    backend: str = "gloo",
    timeout_s: float = 300.0,
) -> WeightSync:
    """Return the transport of a name.

    Args:
        transport: one of `TRANSPORTS`.
        bucket_bytes: weights held beside the learner's own at the same time.
        folder: where ``disk`` writes; the engines must see it under the same path.
        dtype: ``weights.dtype``.
        check: ``weights.check``.
        backend: of the group that ``distributed`` sends through: ``gloo`` or ``nccl``.
        timeout_s: seconds that a group, or a bucket in it, may take.

    """
    if transport == "distributed":
        return DistributedSync(
            bucket_bytes=bucket_bytes, dtype=dtype, check=check, backend=backend, timeout_s=timeout_s
        )
    if transport == "disk":
        return DiskSync(bucket_bytes=bucket_bytes, folder=folder, dtype=dtype, check=check)
    if transport == "ipc":
        return IpcSync(bucket_bytes=bucket_bytes, dtype=dtype, check=check)
    assert transport == "tensor", transport
    return TensorSync(bucket_bytes=bucket_bytes, dtype=dtype, check=check)
