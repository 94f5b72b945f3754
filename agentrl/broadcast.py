"""A `torch.distributed` group of its own, through which one process sends tensors to others.

It is beside the default group, which need not exist, and is found through the store and under the prefixes that torch's
own groups have: ``torch.distributed.broadcast`` in another process (SGLang's) is the other end of `BroadcastGroup`.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # its stubs leave them out
from torch.distributed.distributed_c10d import Backend, BackendConfig

from agentrl.errors import EngineError
from agentrl.protocols import WeightGroup

_LOOPBACK = "127.0.0.1"


def host_towards(url: str) -> str:
    """Return the address of this machine under which the one at ``url`` can reach it."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing: it only picks the route.
        probe.connect((parts.hostname or _LOOPBACK, parts.port or 80))
        return str(probe.getsockname()[0])


def open_store(host: str, timeout_s: float) -> TCPStore:
    """Open the meeting point of a group on a free port of ``host``, and nowhere else."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        listener.listen()
        port = int(listener.getsockname()[1])
        return TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


class BroadcastGroup:
    """The place of this process in a group; rank 0 sends. Made by `join`. Methods block: call them in a thread."""

    def __init__(self, backend: Any, group: WeightGroup) -> None:
        """Take over a process group of torch."""
        self._backend = backend
        self.group = group

    @classmethod
    def join(cls, group: WeightGroup, rank: int, *, timeout_s: float, store: Store | None = None) -> BroadcastGroup:
        """Wait until all ranks have joined; with ``nccl``, until all have their store.

        Args:
            group: which group.
            rank: of this process; 0 sends.
            timeout_s: seconds that joining, and later each tensor, may take.
            store: the meeting point, for the process that opened it.

        Raises:
            EngineError: not all were there in time, or ``backend`` is none that torch has here.
        """
        timeout = timedelta(seconds=timeout_s)
        try:
            store = store or TCPStore(group.host, group.port, is_master=False, timeout=timeout, wait_for_workers=False)
            device = next(iter(BackendConfig(Backend(group.backend)).get_device_backend_map()))
            for prefix in (group.name, f"{group.name}/", f"{device}/"):
                store = PrefixStore(prefix, store)
            with _interface(group.host):
                return cls(_make(group, store, rank, timeout), group)
        except (RuntimeError, ValueError, ImportError) as error:
            raise EngineError(
                f"rank {rank} of {group.size} cannot join the group of weights at {group.host}:{group.port} "
                f"({group.backend}): {_first_line(error)}"
            ) from error

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send the tensors, or on other ranks receive into them; returns when all have passed.

        Raises:
            EngineError: another rank is gone, or too slow. The group cannot be used any more.
        """
        try:
            works = [self._backend.broadcast(tensor, 0) for tensor in tensors]
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise EngineError(f"the broadcast of weights broke off: {_first_line(error)}") from error

    def close(self) -> None:
        """Leave: what other ranks still wait for fails."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.abort()
            backend.shutdown()
            # gloo's connections end with the object.


def _make(group: WeightGroup, store: Store, rank: int, timeout: timedelta) -> Any:
    if group.backend == "nccl":
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        backend = ProcessGroupNCCL(store, rank, group.size, ProcessGroupNCCL.Options())
        backend.set_timeout(timeout)
        return backend
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    return ProcessGroupGloo(store, rank, group.size, timeout=timeout)


@contextmanager
def _interface(host: str) -> Iterator[None]:
    """Keep gloo to the loopback where the group is on one machine; it would take the host name's address."""
    name = "GLOO_SOCKET_IFNAME"
    if host != _LOOPBACK or sys.platform != "linux" or name in os.environ:
        yield
        return
    os.environ[name] = "lo"
    try:
        yield
    finally:
        os.environ.pop(name, None)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}"
