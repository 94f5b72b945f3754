"""GRPO against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.advantages.group_relative import group_relative
from agentrl.algo.base import LossInput
from agentrl.algo.grpo import Grpo
from agentrl.algo.losses.ppo_clip import clipped_policy_loss
from agentrl.algo.losses.sft import sft_loss
from agentrl.algo.registry import ALGORITHMS, make_algorithm
from agentrl.config.algo import GrpoConfig

REWARDS = st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=6), min_size=1, max_size=5)


def selected(weight: list[float], advantages: list[float], logprobs: list[float]) -> LossInput:
    return LossInput(torch.tensor(weight), torch.tensor(advantages), torch.tensor(logprobs))


@given(REWARDS, st.randoms(use_true_random=False), st.booleans())
def test_advantages_equal_numpy_for_groups_of_any_size_in_any_order(groups, random, std):
    flat = [(reward, number) for number, group in enumerate(groups) for reward in group]
    random.shuffle(flat)
    rewards = torch.tensor([float(reward) for reward, _ in flat])
    numbers = torch.tensor([number for _, number in flat])
    found = group_relative(rewards, numbers, std_normalise=std, eps=1e-6).numpy()
    for (reward, number), value in zip(flat, found, strict=True):
        group = np.array(groups[number], np.float64)
        expected = reward - group.mean()
        if std:
            expected /= group.std() + 1e-6
        assert value == pytest.approx(expected, abs=1e-5)


@given(REWARDS, st.floats(-5, 5, width=32), st.booleans())
def test_advantages_sum_to_zero_and_ignore_a_shift_of_rewards(groups, shift, std):
    rewards = torch.tensor([float(reward) for group in groups for reward in group], dtype=torch.float64)
    numbers = torch.tensor([number for number, group in enumerate(groups) for _ in group])
    found = group_relative(rewards, numbers, std_normalise=std)
    moved = group_relative(rewards + shift, numbers, std_normalise=std)
    assert torch.allclose(found, moved, atol=1e-4)
    for number in range(len(groups)):
        assert float(found[numbers == number].sum()) == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("std", [True, False])
def test_a_group_without_variance_gets_exact_zeros(std):
    # 0.1 three times: the mean in floating point is not 0.1.
    rewards = torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0, 0.7])
    found = group_relative(rewards, torch.tensor([0, 0, 0, 1, 1, 2]), std_normalise=std)
    assert found[:3].tolist() == [0.0, 0.0, 0.0]
    assert found[5].item() == 0.0
    assert found[3].item() > 0 > found[4].item()


def test_no_rollouts_give_no_advantages():
    assert group_relative(torch.zeros(0), torch.zeros(0, dtype=torch.int64), std_normalise=True).shape == (0,)


def test_a_reward_that_is_not_finite_is_refused_by_name():
    with pytest.raises(ValueError, match="nan of rollout 1"):
        group_relative(torch.tensor([0.0, float("nan")]), torch.tensor([0, 0]), std_normalise=True)


def test_clipped_loss_equals_numpy():
    rng = np.random.default_rng(3)
    new, old, advantages = rng.normal(-2, 0.5, 200), rng.normal(-2, 0.5, 200), rng.normal(0, 1, 200)
    ratio = np.exp(new - old)
    expected = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.3) * advantages)
    loss, clipped = clipped_policy_loss(torch.tensor(new), torch.tensor(old), torch.tensor(advantages), 0.2, 0.3)
    assert np.allclose(loss.numpy(), expected)
    held = ((ratio > 1.3) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0))
    assert np.array_equal(clipped.numpy(), held)
    assert 0 < held.sum() < 200


def test_gradient_vanishes_exactly_where_clipped():
    new = torch.tensor([0.5, -0.5, 0.5, -0.5, 0.0], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0])
    loss, clipped = clipped_policy_loss(new, torch.zeros(5), advantages, 0.2, 0.2)
    loss.sum().backward()
    assert clipped.tolist() == [True, False, False, True, False]
    assert torch.equal(new.grad == 0, clipped)
    assert new.grad[4].item() == -1.0


def test_learner_logprobs_below_the_ratio_give_the_plain_policy_gradient():
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, metrics = Grpo(GrpoConfig(old_logprobs="learner")).loss(
        new, selected([0.25, 0.75], [2.0, -1.0], [-5.0, -0.1])
    )
    loss.backward()
    assert new.grad.tolist() == [-0.5, 0.75]
    assert metrics.sums["ratio_mean"].item() == 2.0
    assert metrics.sums["clip_fraction"].item() == 0


def test_metrics_measure_the_gap_to_the_sampler():
    new = torch.tensor([-1.0, -2.0, -3.0])
    old = [-1.5, -2.0, -1.0]
    _, metrics = Grpo(GrpoConfig()).loss(new, selected([1.0] * 3, [1.0] * 3, old))
    gap = new.numpy() - np.array(old)
    assert metrics.sums["sampler_kl"].item() == pytest.approx((np.exp(gap) - 1 - gap).sum(), rel=1e-5)
    assert metrics.maxima["ratio_max"].item() == pytest.approx(np.exp(0.5), rel=1e-6)
    assert metrics.maxima["sampler_gap_max"].item() == pytest.approx(2.0)
    assert metrics.sums["clip_fraction"].item() == 1


def test_a_micro_batch_without_a_token_has_loss_zero_and_finite_metrics():
    new = torch.zeros(0, requires_grad=True)
    loss, metrics = Grpo(GrpoConfig()).loss(new, selected([], [], []))
    assert loss.item() == 0
    assert all(value.item() == 0 for value in [*metrics.sums.values(), *metrics.maxima.values()])


def test_sft_loss_is_the_weighted_cross_entropy():
    new = torch.tensor([-1.0, -3.0], requires_grad=True)
    loss, metrics = sft_loss(new, selected([0.5, 0.25], [0.0, 0.0], [0.0, 0.0]))
    assert loss.item() == pytest.approx(1.25)
    assert metrics.sums["nll"].item() == 4.0


def test_the_table_names_every_algorithm_of_the_configuration():
    assert set(ALGORITHMS) == {"grpo"}
    assert isinstance(make_algorithm(GrpoConfig()), Grpo)
