"""Interfaces to control an inference engine: health, pauses, memory, weight updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from agentrl.distributed.base import TensorSpec, WeightGroup

if TYPE_CHECKING:
    import torch

    from agentrl.distributed.sglang_loader.agentrl_weight_loaders import EncodedBucket


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A LoRA adapter, as a PEFT folder has it."""

    config: Mapping[str, Any]
    """The contents of ``adapter_config.json``."""
    tensors: Sequence[tuple[str, torch.Tensor]]
    """By name, on the CPU."""
    ranks: int = 1
    """Processes of the engine that load it."""
    checksums: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the tensors by name, which the engine compares; without any it compares nothing."""


MemoryTag = Literal["weights", "kv_cache"]
"""Memory of an engine that can be released, by SGLang's names."""


class EngineMemory(Protocol):
    """GPU memory of an engine that shares its GPU with the learner."""

    async def release(self, cut: Literal["abort", "restart"] | None = None) -> None:
        """Release weights and KV cache, once no generation is in progress; a second call does nothing.

        Generations wait until all memory has been resumed.

        Args:
            cut: generations in progress are aborted, and continue when the memory is back, as after a pause with this mode; None:
                they end first.

        Raises:
            EngineError: the engine is paused or receives weights, stays busy, or refuses.
        """
        ...

    async def resume(self, tag: MemoryTag) -> None:
        """Allocate released memory again; does nothing if the engine holds it.

        Resumed weights are undefined: nothing is sampled until a whole update has come. Those of an engine with
        `EngineSpec.restores_weights` are what they were.
        """
        ...


class WeightUpdates(Protocol):
    """Weight updates of an engine. All methods raise `EngineError` with the engine's message if it refuses.

    Weights in several buckets take effect together with the last one. An engine that may hold a mixture, because an
    update broke off, samples nothing until a whole one has come.
    """

    async def begin(self) -> None:
        """Let no generation start until the update has ended, and wait for those in progress."""
        ...

    async def cancel(self) -> None:
        """End an update that broke off; does nothing if none is in progress."""
        ...

    async def from_disk(self, folder: Path, version: int) -> None:
        """Load a Hugging Face folder's weights; the prefix cache is flushed."""
        ...

    async def from_tensors(
        self, named: Sequence[tuple[str, torch.Tensor]], version: int, *, last: bool, ranks: int = 1
    ) -> None:
        """Load one bucket of weights by Hugging Face name; after the ``last`` one, ``version`` samples.

        Each of the engine's tensor-parallel ``ranks`` gets all of them: from the request, or from the first rank.
        """
        ...

    async def from_changes(self, changes: EncodedBucket, version: int, *, last: bool, ranks: int = 1) -> None:
        """Load one bucket of changes, as `agentrl.distributed.sglang_loader.agentrl_weight_loaders.encode_changes` returns them.

        Otherwise like `from_tensors`. An engine that has other weights than they are changes to refuses them, or ends.
        """
        ...

    async def from_handles(self, handles: Sequence[str], version: int, *, last: bool) -> None:
        """Load one bucket of weights from memory of the engine's GPUs; otherwise like `from_tensors`.

        ``handles`` has one entry for each of the engine's ranks, see `WeightBucket.share`.
        """
        ...

    async def from_group(self, group: WeightGroup, specs: Sequence[TensorSpec], version: int, *, last: bool) -> None:
        """Load one bucket that rank 0 broadcasts, and return when it has arrived; otherwise like `from_tensors`."""
        ...

    async def from_adapters(self, adapters: Mapping[str, LoraAdapter], version: int) -> None:
        """Load LoRA adapters by policy, with which ``version`` samples; requests that a pause keeps continue with theirs."""
        ...


class WeightGroups(Protocol):
    """Membership of an engine in process groups in which weights are broadcast."""

    async def ranks(self) -> int:
        """Return how many processes of the engine join a group."""
        ...

    async def join(self, group: WeightGroup, first_rank: int) -> None:
        """Join a group as ``first_rank`` and the following ranks; returns when all ranks have joined."""
        ...

    async def leave(self, group: WeightGroup) -> None:
        """Leave a group; pending broadcasts of it fail."""
        ...


class EngineControl(Protocol):
    """Control of one engine. All methods raise `EngineError` with the engine's message if it refuses."""

    @property
    def url(self) -> str:
        """Address of the engine."""
        ...

    @property
    def number(self) -> int:
        """Index of the engine in the run, from 0; the same after a restart."""
        ...

    @property
    def memory(self) -> EngineMemory:
        """Memory that can be released."""
        ...

    @property
    def updates(self) -> WeightUpdates:
        """Weight updates."""
        ...

    @property
    def groups(self) -> WeightGroups:
        """Process groups of weight broadcasts."""
        ...

    async def healthy(self) -> bool:
        """Return whether the engine responds."""
        ...

    async def pause(self, mode: str = "retract") -> None:
        """Stop sampling; ``mode`` is SGLang's ``abort``, ``retract`` or ``in_place``, or ``restart``: see ``weights.pause``."""
        ...

    async def resume(self) -> None:
        """Continue sampling."""
        ...

    async def flush(self) -> None:
        """Drop the prefix cache."""
        ...

    async def version(self) -> int:
        """Return the policy version that samples now."""
        ...

    async def checksums(self) -> dict[str, str]:
        """Return a checksum of every weight by the engine's name for it; see `agentrl.weight_sync.engines`."""
        ...

    async def checksum_kind(self) -> Literal["sha256", "words"]:
        """Return the kind of `checksums`: ``sha256`` on a CPU, `agentrl.models.weight_checksum` on a GPU."""
        ...
