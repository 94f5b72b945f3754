"""CUDA IPC: GPU memory that other processes open. Like torch's pickling of tensors, but the memory is registered once.

Pickling a tensor would register its memory again for each weight sync, and the registrations accumulate for the lifetime
of the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing import reductions
from torch.storage import TypedStorage

from agentrl.core.errors import LearnerError
from agentrl.distributed.base import TensorSpec
from agentrl.distributed.flat_bucket import serialize

_shared_memory: dict[torch.device, SharedMemory] = {}
"""Memory with handles. torch never frees it (seen with 2.11 on an H200), so it is reused."""


class SharedMemory:
    """Bytes on a device, which other processes on the same device can open as tensors. Created by `reserve`."""

    @classmethod
    def reserve(cls, size: int, device: torch.device) -> SharedMemory:
        """Return memory of at least ``size`` bytes, which is valid until the next call.

        Raises:
            LearnerError: the device has too little memory.
        """
        memory = _shared_memory.get(device)
        return memory if memory is not None and len(memory.flat) >= size else cls(size, device)

    def __init__(self, size: int, device: torch.device) -> None:
        try:
            self.flat = torch.empty(size, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise LearnerError(
                f"the learner has no memory on {device} for a bucket of weights of {size >> 20:,} MiB; a smaller "
                f"weights.bucket_mib needs less: {str(error).splitlines()[0]}"
            ) from error
        self._copy: torch.Tensor | None = None
        self._shared: tuple[Any, ...] | None = None
        """Arguments that open it: device, handle, size, offset, the reference counter's file and offset, event, event sync."""

    def on_cpu(self, size: int) -> torch.Tensor:
        """Return the first ``size`` bytes on the CPU, overwritten by the next call."""
        if self.flat.device.type == "cpu":
            return self.flat[:size]
        if self._copy is None:
            self._copy = torch.empty(len(self.flat), dtype=torch.uint8, pin_memory=True)
        return self._copy[:size].copy_(self.flat[:size])

    def handle(self, size: int, specs: Sequence[TensorSpec]) -> str:
        """Return the bucket of ``specs`` in the first ``size`` bytes, which another process opens; see `serialize`.

        Raises:
            LearnerError: the memory is not on a GPU.
        """
        if self.flat.device.type != "cuda":
            raise LearnerError("the weights are not on a GPU, where another process could open them")
        shared = self._export()
        # Processes that open it see everything written so far.
        torch.cuda.current_stream(self.flat.device).synchronize()
        return serialize(SharedTensor(self.flat[:size], shared), specs)

    def _export(self) -> tuple[Any, ...]:
        if self._shared is None:
            _, *handle_args = self.flat.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
            # GPU numbers differ between processes. SGLang's patch of torch accepts a number or a UUID.
            uuid = str(torch.cuda.get_device_properties(self.flat.device).uuid)
            self._shared = (uuid, *handle_args)
            _shared_memory[self.flat.device] = self
        return self._shared


class SharedTensor:
    """Pickles as a tensor in shared memory."""

    def __init__(self, tensor: torch.Tensor, shared: tuple[Any, ...]) -> None:
        """Pickle ``tensor`` in memory that ``shared`` opens; see `SharedMemory`."""
        self._tensor = tensor
        self._shared = shared

    def __reduce__(self) -> tuple[Any, ...]:
        """See `torch.multiprocessing.reductions.reduce_tensor`, without the registration of the memory."""
        t = self._tensor
        tensor_args = (torch.Tensor, tuple(t.size()), t.stride(), t.storage_offset(), TypedStorage, t.dtype)
        device, handle, size, offset, *counter_and_event = self._shared
        return reductions.rebuild_cuda_tensor, (*tensor_args, device, handle, size, offset, False, *counter_and_event)
