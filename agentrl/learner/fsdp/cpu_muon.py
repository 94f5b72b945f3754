"""Muon for parameters on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class CpuMuon(torch.optim.Muon):
    """`torch.optim.Muon` with float32 products: it has bfloat16 ones, for which most CPUs have no instructions.

    State and options are the same. The direction of a step is the momentum's nearest matrix with singular values near 1, by the
    iteration of Newton and Schulz with a polynomial of degree 5 (https://kellerjordan.github.io/posts/muon/). Learning rates are
    those of ``adjust_lr_fn="match_rms_adamw"``: 0.2 times the square root of the longer side (arXiv 2502.16982, section 2.2).
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one step.

        Args:
            closure: evaluates the loss again, which is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step_weight(weight, weight.grad, group)
        return loss

    def _step_weight(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        assert group["adjust_lr_fn"] == "match_rms_adamw", group["adjust_lr_fn"]
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum: Tensor = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        direction = orthogonal(update.float(), group["ns_coefficients"], group["ns_steps"], group["eps"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(direction, alpha=-group["lr"] * 0.2 * max(weight.shape) ** 0.5)


def orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return a matrix with the same singular vectors, whose singular values are near 1; ``[M, N]``, as the argument.

    Args:
        matrix: float32.
        coefficients: a, b, c of the polynomial ``a x + b x³ + c x⁵``, which is applied to the singular values.
        steps: how often.
        eps: least norm that the matrix is divided by.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide: Tensor = matrix.T if is_tall else matrix
    wide = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * (gram @ gram)) @ wide
    return wide.T if is_tall else wide
