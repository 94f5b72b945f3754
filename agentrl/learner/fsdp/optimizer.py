"""Optimizers over sharded parameters, and their states: on the device, or in CPU memory (``learner.cpu_offload``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from agentrl.config.learner import OptimizerConfig
from agentrl.learner.fsdp.adamw_8bit import AdamW8bit, add_rounded
from agentrl.learner.fsdp.compute_copies import take_gradients
from agentrl.learner.fsdp.sharding import shard_mesh
from agentrl.learner.fsdp.weights import local
from agentrl.learner.offload import CpuOffload

CHUNK_BYTES = 1 << 30
"""Bytes of offloaded states that are on the device at the same time, unless those of a single weight are larger."""


def make_optimizers(
    model: nn.Module, head: nn.Module, config: OptimizerConfig, weights: Sequence[nn.Parameter] | None = None
) -> list[Optimizer]:
    """Return AdamW over all trained parameters, or Muon over the layers' matrices and AdamW over the others.

    Vectors, such as norms and biases, have no weight decay.

    Args:
        model: its parameters that require a gradient are trained.
        head: the output head; like the embeddings it is optimized by AdamW.
        config: optimizer and learning rates, without ``auto``.
        weights: those to train; None are all that require a gradient.
    """
    trained = [p for p in model.parameters() if p.requires_grad] if weights is None else [*weights]
    if config.name == "adamw":
        return [_adamw(trained, config)]
    outer = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    outer |= {id(p) for p in head.parameters()}
    matrices = [p for p in trained if p.ndim == 2 and id(p) not in outer]
    chosen = {id(p) for p in matrices}
    adamw_parameters = [p for p in trained if id(p) not in chosen]
    made = {_muon: matrices, _adamw: adamw_parameters}
    return [make(parameters, config) for make, parameters in made.items() if parameters]


def _muon(parameters: list[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    return torch.optim.Muon(
        parameters,
        lr=config.fixed_lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )


def _adamw(parameters: list[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    options: dict[str, Any] = {"betas": config.betas, "eps": config.eps}
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.state == "8bit":
        return AdamW8bit(groups, lr=config.fixed_lr, **options)
    return torch.optim.AdamW(groups, lr=config.fixed_lr, fused=True, **options)


class RoundedGradients:
    """Gradients of micro-batches, added up in bfloat16 (`add_rounded`): a backward pass has float32 ones of one layer at a time.

    Args:
        leaves: those of the backward pass by weight, whole ones: a weight itself or its copy; see `ComputeCopies`.
    """

    def __init__(self, leaves: dict[nn.Parameter, nn.Parameter]) -> None:
        self.step = 0
        """The number of finished optimizer steps, which the noise depends on."""
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._added = 0
        """Gradients that were added since the last step."""
        for weight in leaves:
            weight.grad_dtype = None  # the sum is not of the weight's dtype
        take_gradients(leaves, self._add)

    def _add(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        if weight not in self._sums:
            self._sums[weight] = torch.zeros_like(weight, dtype=torch.bfloat16)
        seed = torch.full((), self.step << 32 | self._added, device=weight.device)
        add_rounded(self._sums[weight], gradient, seed)
        self._added += 1

    def hand_over(self) -> None:
        """Make the sums the gradients of their weights."""
        while self._sums:
            weight, total = self._sums.popitem()
            weight.grad = total

    def clear(self) -> None:
        """Drop the sums."""
        self._sums.clear()
        self._added = 0


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
            gradients = {weight: weight.grad for weight in _weights(optimizer) if weight.grad is not None}
            optimizer.zero_grad()
            self._by_chunks(optimizer, [*gradients], gradients.pop)

    def create(self, optimizers: Sequence[Optimizer]) -> None:
        """Create states of optimizers, unless they exist: the device may have no memory for all of them at the same time."""
        for optimizer in optimizers:
            if optimizer.state:
                continue
            rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            self._by_chunks(optimizer, [*_weights(optimizer)], torch.zeros_like)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def clear(self) -> None:
        """Drop all states, as before the first step."""
        for optimizer in self._optimizers:
            optimizer.state.clear()
        self._offload = CpuOffload()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor of the rank's state is offloaded."""
        return self._offload.holds(local(tensor))

    def cpu_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the contents of an offloaded tensor, or of the shard of one, on the CPU. The next step changes them."""
        return self._offload.cpu_copy(local(tensor))

    def _by_chunks(
        self, optimizer: Optimizer, weights: Sequence[torch.Tensor], gradient_of: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Take a step for some weights at a time. All ranks have the same chunks, as some optimizers gather weights."""
        for chunk in _chunks(weights, self._chunk_bytes):
            self._offload.restore(filter(self._offload.holds, _states(optimizer, chunk)))
            for weight in chunk:
                weight.grad = gradient_of(weight)
            optimizer.step()
            for weight in chunk:
                weight.grad = None
            self._offload.offload(_states(optimizer, chunk))


def _weights(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _states(optimizer: Optimizer, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's shards of states that are as large as weights."""
    states = [optimizer.state.get(weight, {}) for weight in weights]
    return [local(t) for state in states for t in state.values() if isinstance(t, torch.Tensor) and t.ndim]


def _chunks(weights: Sequence[torch.Tensor], chunk_bytes: int) -> Iterator[list[torch.Tensor]]:
    chunk, size = list[torch.Tensor](), 0
    for weight in weights:
        more = 2 * 4 * weight.numel() // (shard_mesh(weight).size() if isinstance(weight, DTensor) else 1)
        if chunk and size + more > chunk_bytes:
            yield chunk
            chunk, size = [], 0
        chunk.append(weight)
        size += more
    if chunk:
        yield chunk
