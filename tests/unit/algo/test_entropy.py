"""The entropy bonus of the loss, and that the learner gives it entropies with a gradient."""

from __future__ import annotations

import pytest
import torch

from agentrl.algo.base import LossInput
from agentrl.algo.batch_loss import make_objective
from agentrl.core.errors import ConfigError
from tests.algo_config import make_algo

WEIGHT = torch.tensor([0.1, 0.2, 0.7])


def batch(entropy: torch.Tensor | None) -> LossInput:
    return LossInput(WEIGHT, torch.tensor([1.0, -1.0, 0.0]), torch.tensor([-1.0, -2.0, -3.0]), entropy_N=entropy)


def test_the_bonus_is_taken_off_the_loss_and_pushes_every_entropy_up():
    entropy = torch.tensor([0.5, 1.5, 2.0], requires_grad=True)
    logprobs = torch.tensor([-1.1, -1.9, -3.0])
    loss, _ = make_objective(make_algo(entropy_coef=0.5))(logprobs, batch(entropy))
    plain, _ = make_objective(make_algo())(logprobs, batch(None))
    assert loss.item() == pytest.approx(plain.item() - 0.5 * (WEIGHT * entropy).sum().item())
    loss.backward()
    assert torch.allclose(entropy.grad, -0.5 * WEIGHT)


def test_without_a_coefficient_entropies_are_not_looked_at():
    loss, _ = make_objective(make_algo())(torch.zeros(3), batch(torch.full((3,), torch.nan)))
    assert torch.isfinite(loss)
    assert not make_algo().trains_everything
    assert make_algo(entropy_coef=0.1).trains_everything


@pytest.mark.parametrize("value", [-0.1, float("inf")])
def test_values_that_mean_nothing_are_refused(value):
    with pytest.raises(ConfigError):
        make_algo(entropy_coef=value)
