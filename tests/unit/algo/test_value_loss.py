"""The critic's loss against a plain reference, and what the critic learns to predict."""

from __future__ import annotations

import math

import pytest
import torch

from agentrl.algo.base import LossInput
from agentrl.algo.batch_loss import ValueLoss


def plain(values: list[float], old: list[float], returns: list[float], clip: float | None) -> tuple[float, list[float]]:
    """The loss with weights of 1, and its derivative by each value."""
    loss, gradient = 0.0, []
    for value, state_before, expected in zip(values, old, returns, strict=True):
        error, slope = (value - expected) ** 2, 2 * (value - expected)
        if clip is not None:
            near = min(max(value, state_before - clip), state_before + clip)
            if (near - expected) ** 2 > error:
                error, slope = (near - expected) ** 2, 0.0 if near != value else slope
        loss += error / 2
        gradient.append(slope / 2)
    return loss, gradient


@pytest.mark.parametrize("clip", [None, 0.1, 0.5])
def test_value_and_gradient_are_those_of_the_formula(clip: float | None) -> None:
    generator = torch.Generator().manual_seed(3)
    values_N, old_N, returns_N, weight_N = torch.randn(4, 64, generator=generator, dtype=torch.float64)
    weight_N = weight_N.abs()
    values_N.requires_grad_()
    loss_input = LossInput(weight_N, weight_N * 0, weight_N * 0, values_N=old_N, returns_N=returns_N)
    loss, metrics = ValueLoss(clip)(values_N, loss_input)
    loss.backward()
    lists = [tensor.detach().tolist() for tensor in (values_N, old_N, returns_N)]
    parts = [plain([value], [old], [expected_value], clip) for value, old, expected_value in zip(*lists, strict=True)]
    weights = weight_N.tolist()
    expected = sum(weight * loss_part for weight, (loss_part, _) in zip(weights, parts, strict=True))
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    slopes = [weight * slope for weight, (_, [slope]) in zip(weights, parts, strict=True)]
    assert values_N.grad is not None
    assert values_N.grad.tolist() == pytest.approx(slopes, rel=1e-12, abs=1e-15)
    clipped = sum(slope == 0 for slope in slopes)
    assert metrics.sums["clip_fraction"].item() == clipped
    assert (clipped > 0) == (clip is not None)
    assert math.isclose(metrics.sums["mean"].item(), sum(lists[0]), rel_tol=1e-12)
