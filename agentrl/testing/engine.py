"""A fake engine in this process: `EngineControl` with weights that are really transferred, and a log of calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agentrl.core.errors import EngineError

if TYPE_CHECKING:
    import torch

    from agentrl.distributed.base import TensorSpec, WeightGroup
    from agentrl.distributed.broadcast_group import BroadcastGroup
    from agentrl.distributed.sglang_loader.agentrl_weight_loaders import EncodedBucket
    from agentrl.inference.base import LoraAdapter, MemoryTag

_JOIN_S = 10.0


class FakeWeightUpdates:
    """Implements `agentrl.inference.base.WeightUpdates`: stores the weights of every transport as an engine would."""

    def __init__(self, refuse: str | None = None, *, stuck: bool = False) -> None:
        self.refuse, self.stuck = refuse, stuck
        self.weights: dict[str, list[float]] = {}
        """What the last updates have loaded, by name."""
        self.adapters: dict[str, LoraAdapter] = {}
        """Adapters by policy."""
        self.folders: list[tuple[Path, int]] = []
        """Folders that were loaded, with their versions."""
        self.handles: list[str] = []
        """The IPC handles of the last bucket."""
        self.events: list[str] = []
        self.sampled_version = 0
        """The policy version that samples."""
        self.group: BroadcastGroup | None = None
        """The last group that it has joined."""
        self.joined: dict[str, BroadcastGroup] = {}
        """Its groups by name: one of each sender."""
        self.received_name: str | None = None
        """Name of the weights that the last changes have produced."""

    async def begin(self) -> None:
        """Let other tasks run, as a request would."""
        await asyncio.sleep(0)

    async def cancel(self) -> None:
        """Log the call."""
        self.events.append("cancel")

    async def from_tensors(
        self, named: Sequence[tuple[str, torch.Tensor]], version: int, *, last: bool, ranks: int = 1
    ) -> None:
        """Store weights; log their names.

        Raises:
            EngineError: the weight ``refuse`` is among them.
        """
        await asyncio.sleep(0)
        if self.refuse in [name for name, _ in named]:
            raise EngineError(f"HTTP 400: no parameter {self.refuse}")
        self.weights |= {name: tensor.tolist() for name, tensor in named}
        self.events.append(f"{','.join(name for name, _ in named)}{' last' if last else ''}")
        if last and not self.stuck:
            self.sampled_version = version

    async def from_handles(self, handles: Sequence[str], version: int, *, last: bool) -> None:
        """Store weights that ``handles`` have by value: on a CPU there are no handles."""
        from agentrl.inference.embedded.weights import read_bucket

        self.handles = list(handles)
        await self.from_tensors(read_bucket(handles), version, last=last)

    async def from_changes(self, changes: EncodedBucket, version: int, *, last: bool, ranks: int = 1) -> None:
        """Apply changes to the weights; raises `WeightChangesError` if they are to others."""
        import torch

        from agentrl.distributed.sglang_loader.agentrl_weight_loaders import ReceivedWeights
        from agentrl.inference.embedded.weights import read_named

        received = ReceivedWeights()
        received.name, self.received_name = self.received_name, None
        decoded, self.received_name = received.receive(read_named([changes.first]))
        named = []
        for header, indices, values in decoded:
            weight = values
            if indices is not None:
                weight = torch.tensor(self.weights[header.name], dtype=values.dtype).view(-1)
                weight[indices] = values
            named.append((header.name, weight.view(header.shape)))
        await self.from_tensors(named, version, last=last)

    async def from_disk(self, folder: Path, version: int) -> None:
        """Store the weights of a folder.

        Raises:
            EngineError: ``refuse`` is set.
        """
        from safetensors.torch import load_file

        if self.refuse:
            raise EngineError("HTTP 400: cannot read")
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        for name, file in index["weight_map"].items():
            self.weights[name] = load_file(folder / file)[name].tolist()
        self.events.append("disk")
        self.folders.append((folder, version))
        if not self.stuck:
            self.sampled_version = version

    async def from_group(self, group: WeightGroup, specs: Sequence[TensorSpec], version: int, *, last: bool) -> None:
        """Receive a broadcast in a real group.

        Raises:
            EngineError: the weight ``refuse`` is announced.
        """
        import torch

        from agentrl.distributed.flat_bucket import total_bytes, views

        if self.refuse in [spec.name for spec in specs]:
            raise EngineError(f"HTTP 400: no parameter {self.refuse}")
        flat = torch.empty(total_bytes(*specs), dtype=torch.uint8)
        await asyncio.to_thread(self.joined[group.name].broadcast, [flat])
        await self.from_tensors(views(specs, flat), version, last=last)

    async def from_adapters(self, adapters: Mapping[str, LoraAdapter], version: int) -> None:
        """Store adapters by policy.

        Raises:
            EngineError: ``refuse`` is set.
        """
        if self.refuse:
            raise EngineError("HTTP 400: no adapters")
        self.adapters = dict(adapters)
        self.events.append("adapters")
        if not self.stuck:
            self.sampled_version = version


class FakeEngine(FakeWeightUpdates):
    """Implements `agentrl.inference.base.EngineControl`, `WeightGroups` and `EngineMemory`.

    Weights of every transport are decoded and stored as an engine would. ``events`` has what was called, in order.
    """

    def __init__(
        self,
        number: int = 0,
        *,
        refuse: str | None = None,
        stuck: bool = False,
        checksum_kind: Literal["sha256", "words"] = "sha256",
        ranks: int = 1,
        dtype: str | None = "float32",
    ) -> None:
        """Create an engine without weights.

        Args:
            number: index in the run.
            refuse: an update with the weight of this name fails; with any weight, if it comes from a folder.
            stuck: updates succeed, but the engine continues with its first version.
            checksum_kind: kind of `checksums`.
            ranks: number of its ranks.
            dtype: the dtype that it reports.
        """
        super().__init__(refuse, stuck=stuck)
        self.number = number
        self.url = f"http://127.0.0.1:{9 + number}"
        self.is_healthy = True
        self.updates = self.groups = self.memory = self
        self._checksum_kind = checksum_kind
        self._ranks, self._dtype = ranks, dtype

    async def ranks(self) -> int:
        """Return the number of its ranks."""
        return self._ranks

    async def dtype(self) -> str | None:
        """Return the dtype that it reports."""
        return self._dtype

    async def join(self, group: WeightGroup, first_rank: int) -> None:
        """Join a real group."""
        from agentrl.distributed.broadcast_group import BroadcastGroup

        self.group = await asyncio.to_thread(BroadcastGroup.join, group, first_rank, timeout_s=_JOIN_S)
        self.joined[group.name] = self.group

    async def leave(self, group: WeightGroup) -> None:
        """Leave the group."""
        self.events.append("leave")
        if (joined := self.joined.pop(group.name, None)) is not None:
            await asyncio.to_thread(joined.close)

    async def release(self, cut: Literal["abort", "restart"] | None = None) -> None:
        """Log the call."""
        self.events.append("release")

    async def resume(self, tag: MemoryTag | None = None) -> None:
        """Log the call: of a memory region, or of the end of a pause."""
        self.events.append("resume" if tag is None else f"resume {tag}")

    async def pause(self, mode: str = "retract") -> None:
        """Log the call."""
        self.events.append(f"pause {mode}")

    async def flush(self) -> None:
        """Log the call."""
        self.events.append("flush")

    async def healthy(self) -> bool:
        """Return ``is_healthy``."""
        return self.is_healthy

    async def version(self) -> int:
        """Return the version that samples."""
        self.events.append("version")
        return self.sampled_version

    async def checksum_kind(self) -> Literal["sha256", "words"]:
        """Return the kind of `checksums`."""
        return self._checksum_kind

    async def checksums(self) -> dict[str, str]:
        """Return the checksums of the weights in float32."""
        import torch

        from agentrl.models.weight_checksum import GpuChecksum, raw_bytes, tensor_checksum

        tensors = {name: torch.tensor(values) for name, values in self.weights.items()}
        if self._checksum_kind == "words":
            return {name: GpuChecksum(raw_bytes(tensor)).hexdigest() for name, tensor in tensors.items()}
        return {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
