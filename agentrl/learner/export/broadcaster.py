"""Rank 0 of the broadcast group through which weights are sent to the engines."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence

import torch

from agentrl.core.errors import EngineError, LearnerError
from agentrl.distributed.base import WeightGroup
from agentrl.distributed.broadcast_group import BroadcastGroup, host_towards, open_store


class WeightBroadcaster:
    """Opens a group, joins it as rank 0 and broadcasts; `leave` may be called concurrently from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._store: object = None
        """The server of the group's store. It ends with this reference, and then processes that wait for it fail."""
        self._group: WeightGroup | None = None
        self._timeout_s = 0.0
        self._joined: BroadcastGroup | None = None

    def open(self, urls: Sequence[str], size: int, backend: str, timeout_s: float) -> WeightGroup:
        """Open the store; see `LearnerGroup.open_group`. An earlier group is left."""
        self.leave()
        hosts = [host_towards(url) for url in urls]
        host = next((address for address in hosts if not address.startswith("127.")), "127.0.0.1")
        store = open_store(host, timeout_s)
        group = WeightGroup(f"agentrl-{uuid.uuid4().hex[:12]}", host, store.port, size, backend)
        with self._lock:
            self._store, self._group, self._timeout_s = store, group, timeout_s
        return group

    def join(self, group: WeightGroup) -> None:
        """Wait until all ranks have joined; see `LearnerGroup.join_group`."""
        if self._group != group:
            raise EngineError(f"the group {group.name} was left")
        joined = BroadcastGroup.join(group, 0, timeout_s=self._timeout_s)
        with self._lock:
            if self._group == group:
                self._joined = joined
                return
        joined.close()
        raise EngineError(f"the group {group.name} was left while it was joined")

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast the tensors of a bucket, all on one device; see `WeightBucket.broadcast`."""
        joined = self._joined
        if joined is None:
            raise LearnerError("rank 0 has joined no group for weight sync")
        on = "cuda" if joined.group.backend == "nccl" else "cpu"
        if on == "cuda" and tensors[0].device.type != on:
            raise LearnerError("NCCL broadcasts from a GPU only, and the weights are on the CPU: the learner sleeps")
        joined.broadcast([tensor.to(on) for tensor in tensors])

    def leave(self) -> None:
        """Leave the group, if there is one; see `LearnerGroup.leave_group`."""
        with self._lock:
            joined, self._joined, self._group = self._joined, None, None
            store, self._store = self._store, None
        if joined is not None:
            joined.close()
        del store
