"""The contract for steering an inference engine: health, memory, weight updates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from agentrl.distributed.base import TensorSpec, WeightGroup

if TYPE_CHECKING:
    import torch

MemoryPart = Literal["weights", "kv_cache"]
"""What of an engine's memory can be given back."""


class EngineControl(Protocol):
    """Steers an engine. All raise `EngineError` with the engine's own words when it refuses.

    Weights in several buckets take effect together with the last one. Where an engine may hold a mixture, because an
    update broke off, it samples nothing until a whole one has come.
    """

    @property
    def url(self) -> str:
        """Where it answers."""
        ...

    @property
    def number(self) -> int:
        """Which of the run's engines it is, from 0; the same once it was started again."""
        ...

    async def healthy(self) -> bool:
        """Return whether the engine answers."""
        ...

    async def pause(self, mode: str = "retract") -> None:
        """Stop sampling; ``mode`` is SGLang's: ``abort``, ``retract`` or ``in_place``."""
        ...

    async def resume(self) -> None:
        """Go on sampling."""
        ...

    async def update_from_disk(self, folder: Path, version: int) -> None:
        """Load a Hugging Face folder's weights; the prefix cache is flushed."""
        ...

    async def update_from_tensors(self, named: Sequence[tuple[str, torch.Tensor]], version: int, *, last: bool) -> None:
        """Take one bucket of weights by Hugging Face name; after the ``last`` one, ``version`` samples."""
        ...

    async def update_from_handles(self, handles: Sequence[str], version: int, *, last: bool) -> None:
        """Take one bucket of weights that lie on the engine's GPUs; otherwise as `update_from_tensors`.

        ``handles`` are one for each of its ranks, see `WeightBucket.share`.
        """
        ...

    async def release_memory(self) -> None:
        """Wait for generations under way, then give weights and KV cache back. Twice is once.

        Generations wait until all memory has been taken back. A paused engine, or one that gets weights, refuses.
        """
        ...

    async def take_back_memory(self, part: MemoryPart) -> None:
        """Take a part of the memory again; nothing where the engine holds it.

        After ``weights`` these are garbage: nothing is sampled until a whole update has come.
        """
        ...

    async def ranks(self) -> int:
        """Return how many processes of it join a `WeightGroup`."""
        ...

    async def join_group(self, group: WeightGroup, first_rank: int) -> None:
        """Join a group, its processes as ``first_rank`` and the next ones; returns when all ranks have joined."""
        ...

    async def leave_group(self, group: WeightGroup) -> None:
        """Leave a group; what it waits for there fails."""
        ...

    async def begin_update(self) -> None:
        """Let no generation start until the update has ended, and wait for those under way."""
        ...

    async def update_from_group(
        self, group: WeightGroup, specs: Sequence[TensorSpec], version: int, *, last: bool
    ) -> None:
        """Take one bucket that rank 0 broadcasts; returns when it has come. Otherwise as `update_from_tensors`."""
        ...

    async def cancel_update(self) -> None:
        """Say that no further bucket comes. Does nothing where no update is under way."""
        ...

    async def checksums(self) -> dict[str, str]:
        """Return a checksum of every weight by the engine's name for it; see `agentrl.weight_sync.checksum`."""
        ...

    async def checksum_kind(self) -> Literal["sha256", "words"]:
        """Return how it makes `checksums`: ``sha256`` on a CPU, `agentrl.models.sglang_gpu_checksum` on a GPU."""
        ...

    async def version(self) -> int:
        """Return the policy version that samples now."""
        ...

    async def flush(self) -> None:
        """Drop the prefix cache."""
        ...
