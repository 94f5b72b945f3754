"""States of torch's optimizers, on the device or in CPU memory (``learner.cpu_offload``), for every learner backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from agentrl.learner.offload import CpuOffload

CHUNK_BYTES = 1 << 30
"""Bytes of offloaded states that are on the device at the same time, unless those of a single weight are larger."""


class OptimizerStates:
    """Takes the steps of a rank's optimizers.

    Offloaded states have memory on the device only while their weights are updated. The optimizer computes the step, on the
    device, for some weights at a time: the results are the same. Counts of steps stay on the device.

    Args:
        optimizers: of the rank.
        offloaded: whether their states are in CPU memory.
        chunk_bytes: see `CHUNK_BYTES`.
    """

    def __init__(self, optimizers: Sequence[Optimizer], *, offloaded: bool, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.offloaded = offloaded
        self._optimizers = optimizers
        self._chunk_bytes = chunk_bytes
        self._offload = CpuOffload()

    def step(self) -> None:
        """Take a step of each optimizer. Gradients of offloaded states are freed as soon as they are used."""
        for optimizer in self._optimizers:
            if not self.offloaded:
                optimizer.step()
                continue
            self.step_by_chunks(optimizer, optimizer.step)

    def step_by_chunks(self, optimizer: Optimizer, step: Callable[[], object]) -> None:
        """Take a step of an optimizer whose states are offloaded; ``step`` takes that of the weights that have a gradient."""
        gradients = {weight: weight.grad for weight in _weights(optimizer) if weight.grad is not None}
        optimizer.zero_grad()
        self._by_chunks(optimizer, [*gradients], gradients.pop, step)

    def create(self, optimizers: Sequence[Optimizer]) -> None:
        """Create states of optimizers, unless they exist: the device may have no memory for all of them at the same time."""
        for optimizer in optimizers:
            if optimizer.state:
                continue
            rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            self._by_chunks(optimizer, [*_weights(optimizer)], torch.zeros_like, optimizer.step)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def clear(self) -> None:
        """Drop all states, as before the first step."""
        for optimizer in self._optimizers:
            optimizer.state.clear()
        self._offload = CpuOffload()

    def restore(self) -> None:
        """Move all offloaded states to the device, until `offload`."""
        self._offload.restore()

    def offload(self) -> None:
        """Move all states, also those that are new, to CPU memory."""
        assert self.offloaded
        self._offload = CpuOffload()
        for optimizer in self._optimizers:
            self._offload.offload(_states(optimizer, [*_weights(optimizer)]))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor of the rank's state is offloaded."""
        return self._offload.holds(_local(tensor))

    def cpu_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the contents of an offloaded tensor, or of the shard of one, on the CPU. The next step changes them."""
        return self._offload.cpu_copy(_local(tensor))

    def _by_chunks(
        self,
        optimizer: Optimizer,
        weights: Sequence[torch.Tensor],
        gradient_of: Callable[[torch.Tensor], torch.Tensor],
        step: Callable[[], object],
    ) -> None:
        """Take a step for some weights at a time. All ranks have the same chunks, as some optimizers gather weights."""
        for chunk in _chunks(weights, self._chunk_bytes):
            self._offload.restore(filter(self._offload.holds, _states(optimizer, chunk)))
            for weight in chunk:
                weight.grad = gradient_of(weight)
            step()
            for weight in chunk:
                weight.grad = None
            self._offload.offload(_states(optimizer, chunk))


def _weights(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _states(optimizer: Optimizer, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's shards of states that are as large as weights."""
    states = [optimizer.state.get(weight, {}) for weight in weights]
    return [_local(t) for state in states for t in state.values() if isinstance(t, torch.Tensor) and t.ndim]


def _chunks(weights: Sequence[torch.Tensor], chunk_bytes: int) -> Iterator[list[torch.Tensor]]:
    chunk, size = list[torch.Tensor](), 0
    for weight in weights:
        more = 2 * 4 * weight.numel() // _shards(weight)
        if chunk and size + more > chunk_bytes:
            yield chunk
            chunk, size = [], 0
        chunk.append(weight)
        size += more
    if chunk:
        yield chunk


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shards(weight: torch.Tensor) -> int:
    """Return the number of ranks that a weight is sharded over."""
    if not isinstance(weight, DTensor):
        return 1
    sizes = zip(weight.device_mesh.shape, weight.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())
