"""CPU offload: of a learner's state while it sleeps, and of the optimizer's between steps; copies to write checkpoints from.

Only the storages are resized; the tensor objects stay, so that parameters, FSDP's shards and the optimizer's state keep
their references.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

_BLOCK_BYTES = 1 << 30
"""Bytes of CPU memory that are allocated at a time: torch rounds pinned memory up to a power of two."""
_ALIGNMENT = 512


class CpuOffload:
    """Moves the contents of tensors to the CPU and back. The CPU memory is kept, and pinned for tensors on a GPU."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._contents: dict[int, torch.Tensor] = {}
        """Bytes by storage."""

    def __bool__(self) -> bool:
        """Whether anything is offloaded."""
        return bool(self._storages)

    def copy(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the contents to the CPU, for `cpu_copy`. Contents that are offloaded are there already."""
        storages = {_key(tensor): tensor.untyped_storage() for tensor in tensors}
        self._contents = {
            key: content for key, content in self._contents.items() if key in storages or key in self._storages
        }
        storages = {key: storage for key, storage in storages.items() if key not in self._storages}
        kept = {key: len(content) for key, content in self._contents.items()}
        for pinned in (False, True):
            sizes = {key: x.nbytes() for key, x in storages.items() if (x.device.type == "cuda") == pinned}
            missing = {key: size for key, size in sizes.items() if size != kept.get(key)}
            self._contents |= _allocate(missing, pinned=pinned)
        for key, storage in storages.items():
            self._contents[key].copy_(_bytes(storage), non_blocking=True)
        _finish(storages.values())

    def offload(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the contents to the CPU and free the device's memory."""
        offloaded = list(tensors)
        self.copy(offloaded)
        for tensor in offloaded:
            self._storages[_key(tensor)] = tensor.untyped_storage()
        for storage in self._storages.values():
            storage.resize_(0)

    def restore(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Allocate the device's memory and copy the contents back; if there is not enough, everything stays offloaded.

        Args:
            tensors: to restore, all offloaded; None: everything.
        """
        keys = [*self._storages] if tensors is None else [_key(tensor) for tensor in tensors]
        storages = {key: self._storages[key] for key in keys}
        try:
            for key, storage in storages.items():
                content = self._contents[key]
                storage.resize_(len(content))
                _bytes(storage).copy_(content, non_blocking=True)
            _finish(storages.values())
        except BaseException:
            for storage in storages.values():
                storage.resize_(0)
            raise
        self._storages = {key: storage for key, storage in self._storages.items() if key not in storages}

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is offloaded."""
        return _key(tensor) in self._storages

    def has_copy(self, tensor: torch.Tensor) -> bool:
        """Return whether the last `copy` or `offload` copied a tensor, which must exist since then."""
        return _key(tensor) in self._contents

    def cpu_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the read-only copy of a tensor on the CPU, as of the last `copy` or `offload`."""
        flat = self._contents[_key(tensor)].view(tensor.dtype)
        return flat.as_strided(tensor.size(), tensor.stride(), flat.storage_offset() + tensor.storage_offset())


def _allocate(sizes: Mapping[int, int], *, pinned: bool) -> dict[int, torch.Tensor]:
    """Return CPU memory of several sizes in bytes, in blocks of ``_BLOCK_BYTES``; what is larger has a block alone."""
    allocated, block, end = {}, torch.empty(0, dtype=torch.uint8), 0
    aligned = {key: -(-size // _ALIGNMENT) * _ALIGNMENT for key, size in sizes.items()}
    remaining = sum(aligned.values())
    for key, size in sizes.items():
        if end + size > len(block):
            length = max(size, min(remaining, _BLOCK_BYTES))
            block, end = torch.empty(length, dtype=torch.uint8, pin_memory=pinned), 0
        allocated[key] = block[end : end + size]
        end, remaining = end + aligned[key], remaining - aligned[key]
    return allocated


def _key(tensor: torch.Tensor) -> int:
    """Identify a storage for its lifetime; its address is 0 while it is offloaded."""
    return int(tensor.untyped_storage()._cdata)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _finish(storages: Iterable[torch.UntypedStorage]) -> None:
    """Wait for asynchronous copies."""
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)
