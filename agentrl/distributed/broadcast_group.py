"""A separate `torch.distributed` group, in which one process broadcasts tensors to others.

It is independent of the default group, which need not exist. Members meet in the store under the prefixes of torch's own
groups: ``torch.distributed.broadcast`` in another process (SGLang's) is the other end of `BroadcastGroup`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # its stubs leave them out
from torch.distributed.distributed_c10d import Backend, BackendConfig

from agentrl.core.background import run_in_daemon_thread
from agentrl.core.child_process import LOOPBACK
from agentrl.core.errors import EngineError
from agentrl.distributed.base import WeightGroup

NAME = "GLOO_SOCKET_IFNAME"


@contextmanager
def gloo_on(address: str) -> Iterator[None]:
    """Let gloo groups that are created in this context use the network interface with ``address``.

    By default gloo uses the address of the host name, which other machines may not be able to reach. An interface that is
    already set in the environment is kept, as is the default if this machine does not have ``address``.
    """
    name = find_interface(address)
    if name is None or NAME in os.environ:
        yield
        return
    os.environ[NAME] = name
    try:
        yield
    finally:
        del os.environ[NAME]


def find_interface(address: str) -> str | None:
    """Return the network interface with ``address``, or None."""
    interfaces = psutil.net_if_addrs().items()
    return next(
        (name for name, addresses in interfaces if address in [address_info.address for address_info in addresses]),
        None,
    )


_CLOSE_S = 5.0
"""Time limit of leaving a group."""


def host_towards(url: str) -> str:
    """Return the address of this machine that the machine at ``url`` can reach."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing: it only picks the route.
        probe.connect((parts.hostname or LOOPBACK, parts.port or 80))
        return str(probe.getsockname()[0])


def open_store(host: str, timeout_s: float) -> TCPStore:
    """Open the store of a group on a free port of ``host``, and on no other address."""
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
    """Membership of this process in a group; rank 0 sends. Created by `join`. Methods block: call them in a thread.

    NCCL connects to the other ranks in the first broadcast, without a time limit, and cannot be aborted meanwhile. So
    everything that may block runs in threads, which `close` and the time limit abandon.
    """

    def __init__(self, backend: Any, group: WeightGroup, timeout_s: float) -> None:
        """Take over a torch process group."""
        self._backend = backend
        self.group = group
        self._timeout_s = timeout_s
        self._left: Future[None] = Future()
        self._lock = Lock()

    @classmethod
    def join(cls, group: WeightGroup, rank: int, *, timeout_s: float, store: Store | None = None) -> BroadcastGroup:
        """Wait until all ranks have joined; with ``nccl``, until this one has the store.

        Args:
            group: which group.
            rank: of this process; 0 sends.
            timeout_s: time limit of joining, and later of each broadcast.
            store: the group's store, in the process that opened it.

        Raises:
            EngineError: not all ranks joined in time, or torch lacks the ``backend`` here.
        """
        timeout = timedelta(seconds=timeout_s)
        try:
            store = store or TCPStore(group.host, group.port, is_master=False, timeout=timeout, wait_for_workers=False)
            device = next(iter(BackendConfig(Backend(group.backend)).get_device_backend_map()))
            for prefix in (group.name, f"{group.name}/", f"{device}/"):
                store = PrefixStore(prefix, store)
            with gloo_on(group.host):
                return cls(_make(group, store, rank, timeout), group, timeout_s)
        except (RuntimeError, ValueError, ImportError) as error:
            raise EngineError(
                f"rank {rank} of {group.size} cannot join the group of weights at {group.host}:{group.port} "
                f"({group.backend}): {_first_line(error)}"
            ) from error

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send the tensors, or on other ranks receive into them; returns when all have been transferred.

        Raises:
            EngineError: another rank died or is too slow, or `close` was called. The group is then unusable.
        """
        backend = self._backend
        if backend is None:
            raise EngineError("the broadcast of weights broke off: the group was left")
        passed = run_in_daemon_thread(partial(_pass, backend, tensors), "weights")
        wait((passed, self._left), timeout=self._timeout_s, return_when=FIRST_COMPLETED)
        if self._left.done():
            raise EngineError("the broadcast of weights broke off: the group was left")
        if not passed.done():
            self.close()
            raise EngineError(f"the broadcast of weights took longer than {self._timeout_s:g} s")
        try:
            passed.result()
        except RuntimeError as error:
            raise EngineError(f"the broadcast of weights broke off: {_first_line(error)}") from error

    def close(self) -> None:
        """Leave the group: pending calls of this and of other ranks fail."""
        with self._lock:
            backend, self._backend = self._backend, None
        if backend is None:
            return
        self._left.set_result(None)
        # gloo's connections close with the object.
        wait((run_in_daemon_thread(partial(_end, backend), "weights"),), timeout=_CLOSE_S)


def _pass(backend: Any, tensors: Sequence[torch.Tensor]) -> None:
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    assert len(devices) <= 1, devices
    # The current device and stream are per thread.
    with torch.cuda.device(*devices) if devices else nullcontext():
        for work in [backend.broadcast(tensor, 0) for tensor in tensors]:
            work.wait()
        for device in devices:
            torch.cuda.current_stream(device).synchronize()


def _end(backend: Any) -> None:
    backend.abort()
    backend.shutdown()


def nccl_as_in_sglang() -> None:
    """Configure NCCL like SGLang does, before its first use in this process.

    It disables cuMem allocations. If only one of two processes uses them, the other fails to map its memory.
    """
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")


def _make(group: WeightGroup, store: Store, rank: int, timeout: timedelta) -> Any:
    if group.backend == "nccl":
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        nccl_as_in_sglang()
        options = ProcessGroupNCCL.Options()
        # NCCL's own time limit ends the whole process, so it must never be reached first.
        options._timeout = 2 * timeout + timedelta(minutes=10)
        return ProcessGroupNCCL(store, rank, group.size, options)
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    return ProcessGroupGloo(store, rank, group.size, timeout=timeout)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}"
