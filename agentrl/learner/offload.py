"""What a rank has on its device, taken to the CPU and back while nobody computes with it.

Only the memory behind the tensors goes: the tensors themselves stay, so that whatever refers to them (parameters,
FSDP's shards, an optimizer's state) needs to know nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Away:
    """Contents of tensors. Memory on the CPU is kept from one absence to the next, pinned where the tensors are on a GPU."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._contents: dict[int, torch.Tensor] = {}
        """Bytes, by storage."""

    def __bool__(self) -> bool:
        """Whether anything is away."""
        return bool(self._storages)

    def take(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the contents and free the memory."""
        storages = {_key(tensor): tensor.untyped_storage() for tensor in tensors}
        self._contents = {key: kept for key, kept in self._contents.items() if key in storages}
        for key, storage in storages.items():
            kept = self._contents.get(key)
            if kept is None or len(kept) != storage.nbytes():
                kept = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
                self._contents[key] = kept
            kept.copy_(_bytes(storage), non_blocking=True)
        _finish(storages.values())
        for key, storage in storages.items():
            self._storages[key] = storage
            storage.resize_(0)

    def bring_back(self) -> None:
        """Take memory again and fill it; where there is not enough, all stays away."""
        try:
            for key, storage in self._storages.items():
                kept = self._contents[key]
                storage.resize_(len(kept))
                _bytes(storage).copy_(kept, non_blocking=True)
            _finish(self._storages.values())
        except BaseException:
            for storage in self._storages.values():
                storage.resize_(0)
            raise
        self._storages = {}

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that is away as one on the CPU, not to be written to; any other one as it is."""
        if _key(tensor) not in self._storages:
            return tensor
        flat = self._contents[_key(tensor)].view(tensor.dtype)
        return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _key(tensor: torch.Tensor) -> int:
    """Identify a storage for as long as it lives; its address is 0 while it is away."""
    return int(tensor.untyped_storage()._cdata)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _finish(storages: Iterable[torch.UntypedStorage]) -> None:
    """Wait for copies under way."""
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)
