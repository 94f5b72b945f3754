"""AdamW whose moments take one byte a weight each, and sums of gradients in bfloat16. Both are rounded stochastically.

Rounding to the nearest number would hold a moment where it is: in 8 bits neighbours are 6 to 12% apart, and a step changes the
root of the second moment by some 2%. Stochastic rounding takes one of both neighbours, with probabilities that make the
expectation exact. Its noise is a function of the step and the place, so that a resumed run rounds as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from agentrl.learner.fsdp.weights import local

BLOCK = 256
"""Neighbours in a row of a weight that share a scale, at most."""
_MIN_BLOCK = 16
"""Weights whose rows have no divisor from here to `BLOCK` get float32 moments."""
_LARGEST = 448.0
"""The largest number of the 8-bit format, e4m3, which has 3 bits of mantissa."""
_FINEST = 2.0**-9
"""The distance of its numbers below 2 to the -6."""
_CODED = ("exp_avg", "exp_avg_sq_root")
"""What is stored in 8 bits; scales have the same name with ``_scale``."""


class Coded(NamedTuple):
    """Numbers in 8 bits, one line a block."""

    codes: torch.Tensor
    """Patterns of the format, uint8."""
    scale: torch.Tensor
    """float32, one column."""


class AdamW8bit(Optimizer):
    """AdamW (arXiv:1711.05101) with both moments in 8 bits: e4m3, with a float32 scale for each block of a row.

    Of the second moment the root is stored. Vectors have float32 moments.

    Args:
        groups: weights, float32, plain tensors or DTensors sharded over their rows, with the ``weight_decay`` of the group.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: term against division by zero.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            # Copied to the device once: weights have taken the same number of steps, as a rule.
            factors, seeds = cache(_factors), cache(_seeds)
            for number, weight in enumerate(group["params"]):
                if weight.grad is None:
                    continue
                state, shard, gradient = self.state[weight], local(weight), local(weight.grad)
                weight.grad = None  # of another dtype than the weight, which compilation does not accept
                if not state:
                    state.update(_zero_moments(weight))
                state["step"] += 1
                steps = int(state["step"])
                options = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
                step_factors = factors(steps, *options, device=shard.device)
                if "exp_avg_sq" in state:
                    _step_float32(shard, gradient, local(state["exp_avg"]), local(state["exp_avg_sq"]), step_factors)
                elif shard.numel():
                    seed = seeds(steps, len(group["params"]), shard.device)[number]
                    _step_coded(shard, gradient, state, step_factors, seed)

    @override
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():  # the base class casts all to the dtype of the weights
            for name in _CODED:
                if f"{name}_scale" in state:
                    state[name] = state[name].to(torch.uint8)


def block_size(shape: Sequence[int]) -> int | None:
    """Return how many neighbours in a row of a weight share a scale; None: its moments are float32.

    Blocks lie within rows: shards of whole rows have the same blocks on any number of ranks.
    """
    if len(shape) < 2:
        return None
    return max((size for size in range(_MIN_BLOCK, BLOCK + 1) if shape[-1] % size == 0), default=None)


def moment_bytes(shape: Sequence[int]) -> int:
    """Return the bytes of both moments of a weight, or of a shard of one."""
    block, numbers = block_size(shape), torch.Size(shape).numel()
    return 8 * numbers if block is None else 2 * numbers + 8 * (numbers // block)


def add_rounded(total: torch.Tensor, gradient: torch.Tensor, seed: torch.Tensor) -> None:
    """Add a gradient to a bfloat16 total of the same shape, rounded stochastically with the noise of a seed (int64)."""
    _kernel(_add_rounded, total.device.type)(total.view(-1), gradient.view(-1), seed)


def _zero_moments(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    block = block_size(weight.shape)
    state = {"step": torch.zeros((), dtype=torch.float32)}
    if block is None:
        return state | {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
    for name in _CODED:
        state[name] = torch.zeros_like(weight, dtype=torch.uint8)
        state[f"{name}_scale"] = _zero_scales(weight, block)
    return state


def _zero_scales(weight: torch.Tensor, block: int) -> torch.Tensor:
    """Return a zero for each block, sharded as the weight is."""
    shard = local(weight)
    scales = torch.zeros(*shard.shape[:-1], shard.shape[-1] // block, dtype=torch.float32, device=shard.device)
    if not isinstance(weight, DTensor):
        return scales
    shape = torch.Size((*weight.shape[:-1], weight.shape[-1] // block))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        scales, weight.device_mesh, weight.placements, run_check=False, shape=shape, stride=stride
    )


def _seeds(steps: int, count: int, device: torch.device) -> torch.Tensor:
    """Return a seed for each weight, other ones in each step."""
    return torch.arange(steps * count, (steps + 1) * count, device=device)


def _factors(
    steps: int, lr: float, beta_1: float, beta_2: float, eps: float, decay: float, *, device: torch.device
) -> torch.Tensor:
    """Return what the kernels need, on the device: numbers in their code would be compiled again for every step."""
    numbers = (beta_1, beta_2, lr / (1 - beta_1**steps), (1 - beta_2**steps) ** -0.5, eps, 1 - lr * decay)
    return torch.tensor(numbers, dtype=torch.float32, device=device)


@cache
def _kernel(function: Callable[..., None], device: str) -> Callable[..., None]:
    """Return the function, on GPUs compiled once for all shapes."""
    return torch.compile(function, dynamic=True) if device == "cuda" else function


def _step_float32(
    weight: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, factors: torch.Tensor
) -> None:
    gradient = gradient.float()
    mean.lerp_(gradient, 1 - factors[0])
    square.lerp_(gradient**2, 1 - factors[1])
    _change(weight, mean, square.sqrt(), factors)


def _step_coded(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    state: dict[str, torch.Tensor],
    factors: torch.Tensor,
    seed: torch.Tensor,
) -> None:
    block = block_size(weight.shape)
    assert block is not None
    mean, root = (
        Coded(local(state[name]).view(-1, block), local(state[f"{name}_scale"]).view(-1, 1)) for name in _CODED
    )
    _kernel(_step_8bit, weight.device.type)(weight.view(-1, block), gradient.view(-1, block), mean, root, factors, seed)


def _step_8bit(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    mean: Coded,
    root: Coded,
    factors: torch.Tensor,
    seed: torch.Tensor,
) -> None:
    """Change arrays with one line a block."""
    beta_1, beta_2 = factors[0], factors[1]
    gradient = gradient.float()
    new_mean = beta_1 * decode(mean) + (1 - beta_1) * gradient
    new_root = (beta_2 * decode(root) ** 2 + (1 - beta_2) * gradient**2).sqrt()
    _change(weight, new_mean, new_root, factors)
    encode(new_mean, mean, seed)
    encode(new_root, root, ~seed)


def _change(weight: torch.Tensor, mean: torch.Tensor, root: torch.Tensor, factors: torch.Tensor) -> None:
    weight.copy_(weight * factors[5] - factors[2] * mean / (root * factors[3] + factors[4]))


def decode(coded: Coded) -> torch.Tensor:
    """Return the numbers that are coded, float32."""
    return coded.codes.view(torch.float8_e4m3fn).float() * coded.scale


def encode(values: torch.Tensor, into: Coded, seed: torch.Tensor) -> None:
    """Write float32 values, with scales that make the largest of a line the largest number of the format."""
    scale = values.abs().amax(dim=1, keepdim=True) / _LARGEST
    scaled = values / scale.clamp(min=torch.finfo(torch.float32).tiny)
    # The power of two below a number is its float32 pattern without the mantissa.
    power = (scaled.view(torch.int32) & 0x7F800000).view(torch.float32)
    distance = (power / 8).clamp(min=_FINEST)
    rounded = torch.floor(scaled / distance + _noise(scaled, seed) / 2**16) * distance
    into.codes.copy_(rounded.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).view(torch.uint8))
    into.scale.copy_(scale)


def _add_rounded(total: torch.Tensor, gradient: torch.Tensor, seed: torch.Tensor) -> None:
    pattern = (total.float() + gradient.float()).view(torch.int32)
    # Bits below those of bfloat16 carry into them with the probability that is their share.
    rounded = (pattern + _noise(pattern, seed)) & -65536
    total.copy_(rounded.view(torch.float32).to(torch.bfloat16))


def _noise(like: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Return an integer from 0 to 65,535 for each place, int32: a hash of the place and the seed."""
    bits = torch.arange(like.numel(), device=like.device).view(like.shape) + seed * 0x9E3779B1
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = bits & 0xFFFFFFFF
        bits = (bits ^ (bits >> shift)) * factor
    return ((bits >> 12) & 0xFFFF).to(torch.int32)
