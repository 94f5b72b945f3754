"""Baselines for the transfer rate of a weight sync: a copy on one device, and a broadcast to another process."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from statistics import median
from types import TracebackType
from typing import Self

import torch

from agentrl.core.child_process import LOOPBACK
from agentrl.core.errors import LearnerError
from agentrl.distributed.base import WeightGroup
from agentrl.distributed.broadcast_group import BroadcastGroup, open_store

_REPEATS = 3
_JOIN_S = 120.0


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished all submitted work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_rate(device: torch.device, chunk: int, total: int) -> float:
    """Return the rate in bytes per second of copying ``total`` bytes on the device, ``chunk`` at a time."""
    source = torch.ones(chunk, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return _rate(lambda count: _time_moves(copy, count, device), chunk, total)


class Broadcast:
    """A second process that receives what this one broadcasts; a context manager.

    Args:
        device: of this process.
        gpu: the GPU of the other, as in ``CUDA_VISIBLE_DEVICES``; None for the CPU.
    """

    def __init__(self, device: torch.device, gpu: str | None) -> None:
        self._device = device
        store = open_store(LOOPBACK, _JOIN_S)
        backend = "gloo" if gpu is None else "nccl"
        group = WeightGroup("agentrl-plain", LOOPBACK, store.port, 2, backend)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_receive, args=(theirs, group, gpu), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._group = BroadcastGroup.join(group, 0, timeout_s=_JOIN_S, store=store)
        except BaseException:
            self._process.kill()
            raise

    def __enter__(self) -> Self:
        """Return the broadcast."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the other process."""
        self._pipe.close()
        self._process.join(10.0)
        self._process.kill()
        self._group.close()

    def rate(self, chunk: int, total: int) -> float:
        """Return the rate in bytes per second of sending ``total`` bytes, ``chunk`` at a time, until the other has received them.

        Raises:
            LearnerError: the other process has ended.
        """
        flat = torch.ones(chunk, dtype=torch.uint8, device=self._device)

        def seconds(count: int) -> float:
            self._pipe.send((chunk, count))
            self._pipe.recv()  # its memory is allocated
            begun = time.perf_counter()
            self._group.broadcast([flat] * count)
            self._pipe.recv()
            return time.perf_counter() - begun

        try:
            return _rate(seconds, chunk, total)
        except EOFError:
            raise LearnerError("the process that received a plain broadcast has ended; its error is above") from None


def _receive(pipe: Connection, group: WeightGroup, gpu: str | None) -> None:
    """Receive the number of broadcasts that is sent through ``pipe``, until it is closed."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    device = torch.device("cpu" if gpu is None else "cuda:0")
    joined = BroadcastGroup.join(group, 1, timeout_s=_JOIN_S)
    while True:
        try:
            chunk, count = pipe.recv()
        except EOFError:
            joined.close()
            return
        flat = torch.empty(chunk, dtype=torch.uint8, device=device)
        synchronize(device)
        pipe.send("ready")
        joined.broadcast([flat] * count)
        synchronize(device)
        pipe.send("done")


def _time_moves(move: Callable[[], None], count: int, device: torch.device) -> float:
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(count):
        move()
    synchronize(device)
    return time.perf_counter() - begun


def _rate(seconds: Callable[[int], float], chunk: int, total: int) -> float:
    """Return bytes per second: the median of three runs after a warm-up run."""
    count = -(-total // chunk)
    seconds(1)
    return count * chunk / median(seconds(count) for _ in range(_REPEATS))
