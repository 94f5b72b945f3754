"""The weight sync contract, and what a transport declares about itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from agentrl.config.engine_groups import all_samplers
from agentrl.config.schema import Config
from agentrl.inference.base import EngineControl
from agentrl.learner.base import LearnerGroup


@dataclass(frozen=True, slots=True)
class SyncedWeights:
    """What a weight sync has sent to each engine."""

    fingerprint: int
    """64 bits that differ from those of another sync if any weight differs."""
    bytes: int
    """Size of the weights as they were sent."""


class WeightSync(Protocol):
    """Syncs the learner's weights to the engines."""

    async def sync_weights(
        self, learner: LearnerGroup, engines: Sequence[EngineControl], version: int
    ) -> SyncedWeights:
        """Sync the weights as policy ``version``, then check the engines according to ``weights.check``.

        Raises:
            EngineError: an engine or the check failed. Engines that may hold a mixture of versions sample nothing until
                a whole update has arrived.
        """
        ...

    async def aclose(self) -> None:
        """Release resources that are kept between updates."""
        ...


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """What a transport is created with. Example: ``TransportOptions(bucket_bytes=512 << 20, folder=Path("runs/a/weights"))``."""

    bucket_bytes: int
    """Size of a bucket, held in addition to the learner's weights; a larger tensor gets a separate bucket."""
    folder: Path
    """Where files may be written. The engines see it under the same path."""
    dtype: str | None = None
    """Weights are cast to it before they are sent; None keeps the learner's dtype."""
    check: str = "version"
    """``weights.check``: how engines are checked afterwards; see `agentrl.weight_sync.engines.UpdateCheck`."""
    backend: str = "gloo"
    """``nccl`` if the learner's rank 0 and all engines are on GPUs, else ``gloo``."""
    timeout_s: float = 300.0
    """Time limit of a collective operation."""


class Transport(WeightSync, ABC):
    """A value of ``weights.transport``: sends all weights. The class declares what it needs."""

    default_bucket_mib: ClassVar[int] = 512
    """Size of a bucket if ``weights.bucket_mib`` is not set; 512 suits transports that copy a bucket on the CPU."""
    works_while_offloaded: ClassVar[bool] = True
    """Whether a learner that is offloaded to the CPU can send. If not, a restarted engine gets its weights by ``tensor``."""
    tensor_ranks_only: ClassVar[bool] = False
    """Whether it reaches SGLang's tensor parallel ranks only."""
    engine_options: ClassVar[Mapping[str, Any]] = {}
    """Options with which a run starts SGLang engines, as in ``sampler.sglang``."""

    def __init__(self, options: TransportOptions) -> None:
        self.options = options

    @classmethod
    def bucket_bytes(cls, bucket_mib: int | None) -> int:
        """Return the size of a bucket in bytes: ``weights.bucket_mib``, or the transport's default."""
        return (bucket_mib or cls.default_bucket_mib) << 20

    @classmethod
    def faults(cls, config: Config) -> Iterator[str]:
        """Yield why the transport cannot work with this configuration: the keys, their values, and what to set."""
        # Pipeline stages and data parallel replicas number their tensor parallel ranks from 0 again.
        engines = [sampler for _, sampler in all_samplers(config.sampler)]
        if cls.tensor_ranks_only and any(sampler.engine_ranks != sampler.tensor_ranks for sampler in engines):
            yield (
                f"weights.transport={config.weights.transport} reaches SGLang's tensor parallel ranks only; set "
                "weights.transport=disk"
            )

    @abstractmethod
    async def sync_weights(
        self, learner: LearnerGroup, engines: Sequence[EngineControl], version: int
    ) -> SyncedWeights:
        """Sync the weights; see `WeightSync.sync_weights`."""

    async def aclose(self) -> None:
        """Release resources that are kept between updates."""
