"""The effective sample size of importance weights: its bounds, and that it does not depend on micro-batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.correction import effective_sample_size
from tests.algo_config import make_algo
from tests.unit.algo.test_objective import make_objective, selected

WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20)


def size(weights: list[float]) -> float:
    return effective_sample_size(sum(weights), sum(weight**2 for weight in weights), len(weights))


@given(WEIGHTS, st.floats(1e-2, 1e2))
def test_it_is_a_share_that_scale_does_not_change(weights: list[float], scale: float) -> None:
    actual = size(weights)
    assert 1 / len(weights) - 1e-9 <= actual <= 1 + 1e-9
    assert size([scale * weight for weight in weights]) == pytest.approx(actual)
    assert (actual == pytest.approx(1, abs=1e-9)) == (
        max(weights) - min(weights) < 1e-3 * max(weights)
    ) or actual > 0.999


def test_one_weight_and_none() -> None:
    assert size([3.0, 0.0, 0.0, 0.0]) == 0.25
    assert size([0.7] * 5) == pytest.approx(1)
    assert effective_sample_size(0.0, 0.0, 0.0) == 0


@given(st.lists(st.tuples(st.floats(-3, 0), st.floats(-3, 0)), min_size=1, max_size=12), st.integers(0, 12))
def test_the_sums_of_micro_batches_add_up(logprobs: list[tuple[float, float]], cut: int) -> None:
    objective = make_objective(make_algo())
    parts = []
    for micro_batch in (logprobs, logprobs[:cut], logprobs[cut:]):
        loss_input = selected([1.0] * len(micro_batch), [1.0] * len(micro_batch), [old for _, old in micro_batch])
        parts.append(
            objective(torch.tensor([new for new, _ in micro_batch]), loss_input)[1].weights["effective_sample_size"]
        )
    assert torch.allclose(parts[0], parts[1] + parts[2], rtol=1e-4, atol=1e-5)
