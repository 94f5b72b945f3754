"""Memory of a GPU that other processes open: what torch's own pickling of tensors does, but once for many tensors.

Pickling each tensor would register their common memory anew for each, as often as weights are sent, and those
registrations pile up for as long as the memory lives.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing import reductions
from torch.storage import TypedStorage

from agentrl.core.errors import LearnerError

_opened: dict[torch.device, SharedMemory] = {}
"""Memory that handles were given of. torch keeps it for good (seen with 2.11 on an H200), so it is used again."""


class SharedMemory:
    """Bytes on a device, which other processes on it can open as tensors. Made by `of`."""

    @classmethod
    def of(cls, size: int, device: torch.device) -> SharedMemory:
        """Return memory of at least ``size`` bytes; what is in it stays until the next call."""
        kept = _opened.get(device)
        return kept if kept is not None and len(kept.flat) >= size else cls(size, device)

    def __init__(self, size: int, device: torch.device) -> None:
        self.flat = torch.empty(size, dtype=torch.uint8, device=device)
        self._copy: torch.Tensor | None = None
        self._shared: tuple[Any, ...] | None = None
        """How to open it: device, handle, size, offset, reference counter's file and place, event, whether to wait."""

    def on_cpu(self, size: int) -> torch.Tensor:
        """Return the first ``size`` bytes on the CPU, overwritten by the next call."""
        if self.flat.device.type == "cpu":
            return self.flat[:size]
        if self._copy is None:
            self._copy = torch.empty(len(self.flat), dtype=torch.uint8, pin_memory=True)
        return self._copy[:size].copy_(self.flat[:size])

    def handles(self, named: Sequence[tuple[str, torch.Tensor]]) -> str:
        """Return what `torch.multiprocessing` rebuilds into ``named``, views of this memory, when unpickled: in base64.

        Raises:
            LearnerError: the memory is not a GPU's.

        """
        if self.flat.device.type != "cuda":
            raise LearnerError("the weights are not on a GPU, where another process could open them")
        shared = self._share()
        # Whoever opens it sees what was written up to now.
        torch.cuda.current_stream(self.flat.device).synchronize()
        return pack_handles(named, shared)

    def _share(self) -> tuple[Any, ...]:
        if self._shared is None:
            _, *rest = self.flat.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
            # Processes see different numbers of GPUs. SGLang's patch of torch takes a number or this.
            uuid = str(torch.cuda.get_device_properties(self.flat.device).uuid)
            self._shared = (uuid, *rest)
            _opened[self.flat.device] = self
        return self._shared


def pack_handles(named: Sequence[tuple[str, torch.Tensor]], shared: tuple[Any, ...]) -> str:
    """Return, in base64, a pickle of tensors in memory that is opened by ``shared``; see `SharedMemory`."""
    return base64.b64encode(pickle.dumps([(name, _Opened(tensor, shared)) for name, tensor in named])).decode()


class _Opened:
    """Pickled, this is a tensor in shared memory."""

    def __init__(self, tensor: torch.Tensor, shared: tuple[Any, ...]) -> None:
        self._tensor = tensor
        self._shared = shared

    def __reduce__(self) -> tuple[Any, ...]:
        """See `torch.multiprocessing.reductions.reduce_tensor`, whose result this is but for the memory's registration."""
        t = self._tensor
        where = (torch.Tensor, tuple(t.size()), t.stride(), t.storage_offset(), TypedStorage, t.dtype)
        device, handle, size, offset, *counter_and_event = self._shared
        return reductions.rebuild_cuda_tensor, (*where, device, handle, size, offset, False, *counter_and_event)
