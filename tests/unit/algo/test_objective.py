"""The policy objective: its policy loss, its metrics, and the loss of supervised fine-tuning."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agentrl.algo.base import LossInput
from agentrl.algo.batch_loss import make_objective, sft_loss
from agentrl.algo.losses.ppo_clip import PpoClip
from tests.algo_config import make_algo


def selected(weight: list[float], advantages: list[float], logprobs: list[float]) -> LossInput:
    return LossInput(torch.tensor(weight), torch.tensor(advantages), torch.tensor(logprobs))


def test_clipped_loss_equals_numpy():
    rng = np.random.default_rng(3)
    new, old, advantages = rng.normal(-2, 0.5, 200), rng.normal(-2, 0.5, 200), rng.normal(0, 1, 200)
    ratio = np.exp(new - old)
    expected = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.3) * advantages)
    loss_input = selected([1.0] * 200, advantages.tolist(), old.tolist())
    actual = PpoClip(PpoClip.Options(clip_low=0.2, clip_high=0.3)).token_loss(
        torch.tensor(new), torch.tensor(old), loss_input
    )
    loss, clipped = actual.loss_N, actual.clipped_N
    assert np.allclose(loss.numpy(), expected)
    is_clipped = ((ratio > 1.3) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0))
    assert np.array_equal(clipped.numpy(), is_clipped)
    assert 0 < is_clipped.sum() < 200


def test_gradient_vanishes_exactly_where_clipped():
    new = torch.tensor([0.5, -0.5, 0.5, -0.5, 0.0], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0])
    token_loss = PpoClip().token_loss(new, torch.zeros(5), selected([1.0] * 5, advantages.tolist(), [0.0] * 5))
    clipped = token_loss.clipped_N
    token_loss.loss_N.sum().backward()
    assert clipped.tolist() == [True, False, False, True, False]
    assert torch.equal(new.grad == 0, clipped)
    assert new.grad[4].item() == -1.0


def test_learner_logprobs_below_the_ratio_give_the_plain_policy_gradient():
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, metrics = make_objective(make_algo(old_logprobs="learner", correction={"rollout_is": "none"}))(
        new, selected([0.25, 0.75], [2.0, -1.0], [-5.0, -0.1])
    )
    loss.backward()
    assert new.grad.tolist() == [-0.5, 0.75]
    assert metrics.sums["ratio_mean"].item() == 2.0
    assert metrics.sums["clip_fraction"].item() == 0


def test_metrics_measure_the_gap_to_the_sampler():
    new = torch.tensor([-1.0, -2.0, -3.0])
    old = [-1.5, -2.0, -1.0]
    _, metrics = make_objective(make_algo())(new, selected([1.0] * 3, [1.0] * 3, old))
    gap = new.numpy() - np.array(old)
    assert metrics.sums["sampler_kl"].item() == pytest.approx((np.exp(gap) - 1 - gap).sum(), rel=1e-5)
    total, squares = metrics.weights["effective_sample_size"].tolist()
    assert (total, squares) == pytest.approx((np.exp(gap).sum(), np.exp(2 * gap).sum()), rel=1e-5)
    assert metrics.maxima["ratio_max"].item() == pytest.approx(np.exp(0.5), rel=1e-6)
    assert metrics.maxima["sampler_gap_max"].item() == pytest.approx(2.0)
    assert metrics.sums["clip_fraction"].item() == 1


def test_a_micro_batch_without_a_token_has_loss_zero_and_finite_metrics():
    new = torch.zeros(0, requires_grad=True)
    loss, metrics = make_objective(make_algo())(new, selected([], [], []))
    assert loss.item() == 0
    assert all(value.item() == 0 for value in [*metrics.sums.values(), *metrics.maxima.values()])


def test_sft_loss_is_the_weighted_cross_entropy():
    new = torch.tensor([-1.0, -3.0], requires_grad=True)
    loss, metrics = sft_loss(new, selected([0.5, 0.25], [0.0, 0.0], [0.0, 0.0]))
    assert loss.item() == pytest.approx(1.25)
    assert metrics.sums["nll"].item() == 4.0
