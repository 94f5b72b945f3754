"""The transports of ``weights.transport``."""

from __future__ import annotations

from pathlib import Path

from agentrl.config.sampler import SamplerConfig
from agentrl.config.schema import Config
from agentrl.distributed.sglang_loader import LOADER
from agentrl.weight_sync.base import WeightSync
from agentrl.weight_sync.delta import DeltaSync
from agentrl.weight_sync.disk import DiskSync
from agentrl.weight_sync.distributed import DistributedSync
from agentrl.weight_sync.ipc import IpcSync
from agentrl.weight_sync.tensor import TensorSync

TRANSPORTS = ("tensor", "disk", "distributed", "ipc", "delta")
"""Values of ``weights.transport``."""
_BUCKET_MIB = {"ipc": 4096, "distributed": 4096}
"""Default sizes of a bucket, which costs a few milliseconds by itself. The memory of ``ipc`` is not freed between syncs."""
_BUCKET_BY_VALUE_MIB = 512
"""Default size for the other transports, which copy a bucket on the CPU."""


def bucket_bytes_of(transport: str, bucket_mib: int | None) -> int:
    """Return the size of a bucket in bytes: ``weights.bucket_mib``, or the transport's default."""
    return (bucket_mib or _BUCKET_MIB.get(transport, _BUCKET_BY_VALUE_MIB)) << 20


def for_transport(config: Config) -> Config:
    """Return the configuration of a run whose SGLang engines take what ``weights.transport`` sends."""
    sampler = config.sampler
    if config.weights.transport != "delta" or sampler.backend != "sglang" or sampler.urls:
        return config
    return config.model_copy(update={"sampler": with_changes(sampler)})


def with_changes(sampler: SamplerConfig) -> SamplerConfig:
    """Return the configuration of SGLang engines that take changes of weights."""
    return sampler.model_copy(update={"sglang": sampler.sglang | {"custom_weight_loader": [LOADER]}})


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
    """Return a transport by name.

    Args:
        transport: one of `TRANSPORTS`.
        bucket_bytes: size of a bucket, held in addition to the learner's weights.
        folder: ``disk`` writes here; the engines must see it under the same path.
        dtype: ``weights.dtype``.
        check: ``weights.check``.
        backend: of the group of ``distributed``: ``gloo`` or ``nccl``.
        timeout_s: time limit of ``distributed`` for creating a group, and for each bucket.

    """
    if transport == "distributed":
        return DistributedSync(
            bucket_bytes=bucket_bytes, dtype=dtype, check=check, backend=backend, timeout_s=timeout_s
        )
    if transport == "disk":
        return DiskSync(bucket_bytes=bucket_bytes, folder=folder, dtype=dtype, check=check)
    if transport == "delta":
        return DeltaSync(bucket_bytes=bucket_bytes, dtype=dtype, check=check)
    if transport == "ipc":
        return IpcSync(bucket_bytes=bucket_bytes, dtype=dtype, check=check)
    assert transport == "tensor", transport
    return TensorSync(bucket_bytes=bucket_bytes, dtype=dtype, check=check)
