"""KL estimates against their formulas, finite differences, and exact sums over a small vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.base import LossInput
from agentrl.algo.batch_loss import make_objective
from agentrl.algo.kl import kl_estimate
from agentrl.core.errors import ConfigError
from tests.algo_config import make_algo

KINDS = ["k1", "k2", "k3", "low_var_kl"]
LOGPROBS = st.lists(st.tuples(st.floats(-9, 0), st.floats(-9, 0)), min_size=1, max_size=8)


def formula(logprob: np.ndarray, reference: np.ndarray, kind: str) -> np.ndarray:
    ratio = np.exp(reference - logprob)
    return {
        "k1": -np.log(ratio),
        "k2": np.log(ratio) ** 2 / 2,
        "k3": ratio - 1 - np.log(ratio),
        "low_var_kl": np.minimum(ratio - 1 - np.log(ratio), 10),
    }[kind]


@pytest.mark.parametrize("kind", KINDS)
@given(pairs=LOGPROBS)
def test_values_and_gradients_are_the_formulas(kind, pairs):
    new, reference = (np.array(values) for values in zip(*pairs, strict=True))
    logprobs = torch.tensor(new, requires_grad=True)
    actual_kl_estimate = kl_estimate(logprobs, torch.tensor(reference), kind)
    assert np.allclose(actual_kl_estimate.detach().numpy(), formula(new, reference, kind), rtol=1e-9, atol=1e-9)
    actual_kl_estimate.sum().backward()
    step = 1e-6
    slope = (formula(new + step, reference, kind) - formula(new - step, reference, kind)) / (2 * step)
    smooth = abs(formula(new, reference, "k3") - 10) > 1e-2 if kind == "low_var_kl" else np.ones(len(new), bool)
    assert np.allclose(logprobs.grad.numpy()[smooth], slope[smooth], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["k2", "k3", "low_var_kl"])
def test_a_policy_that_is_the_reference_has_no_kl_and_no_gradient(kind):
    logprobs = torch.tensor([-0.1, -3.7, -11.0, 0.0], requires_grad=True)
    actual_kl_estimate = kl_estimate(logprobs, logprobs.detach().clone(), kind)
    actual_kl_estimate.sum().backward()
    assert actual_kl_estimate.tolist() == [0.0] * 4
    assert logprobs.grad.tolist() == [0.0] * 4


def test_means_over_fresh_samples_are_as_documented():
    """Sums over a vocabulary of 7, each token weighted by its probability: what infinitely many samples would give."""
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.normal(size=7), requires_grad=True)
    log_p, log_q = logits.log_softmax(-1), torch.tensor(rng.normal(size=7)).log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    forward, backward = (p * (log_p - log_q)).sum(), (q * (log_q - log_p)).sum()

    def mean(kind: str) -> tuple[float, torch.Tensor]:
        value = (p.detach() * kl_estimate(log_p, log_q, kind)).sum()
        return value.item(), torch.autograd.grad(value, logits, retain_graph=True)[0]

    def gradient(of: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(of, logits, retain_graph=True)[0]

    assert mean("k1")[0] == pytest.approx(forward.item())
    assert mean("k3")[0] == pytest.approx(forward.item())
    assert mean("k2")[0] != pytest.approx(forward.item(), rel=1e-2)
    assert torch.allclose(mean("k1")[1], torch.zeros(7, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(mean("k2")[1], gradient(forward))
    assert torch.allclose(mean("k3")[1], gradient(backward))
    assert not torch.allclose(gradient(forward), gradient(backward), rtol=1e-2)


def test_k3_stays_finite_and_pulls_where_the_reference_would_not_go():
    logprobs = torch.tensor([-100.0, -0.1, -30.0], requires_grad=True)
    actual_kl_estimate = kl_estimate(logprobs, torch.tensor([-0.1, -100.0, -0.1]), "k3")
    actual_kl_estimate.sum().backward()
    assert torch.isfinite(actual_kl_estimate).all()
    assert logprobs.grad.tolist() == [0.0, 1.0, 0.0]
    assert actual_kl_estimate[1].item() == pytest.approx(98.9)


def test_low_var_kl_is_k3_cut_off_at_10():
    logprobs = torch.tensor([-1.0, -5.0, -0.1], requires_grad=True)
    reference = torch.tensor([-2.0, -1.0, -40.0])
    actual_kl_estimate = kl_estimate(logprobs, reference, "low_var_kl")
    actual_kl_estimate.sum().backward()
    assert actual_kl_estimate[0] == kl_estimate(logprobs, reference, "k3")[0]
    assert actual_kl_estimate[1:].tolist() == [10.0, 10.0]
    assert logprobs.grad[0] > 0
    assert logprobs.grad[1:].tolist() == [0.0, 0.0]


def batch(reference: torch.Tensor | None) -> tuple[torch.Tensor, LossInput]:
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -3.0], requires_grad=True)
    weight, advantages = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([1.0, -1.0, 0.0, 0.0])
    return logprobs, LossInput(
        weight, advantages, torch.tensor([-1.1, -1.9, -0.5, -2.0]), reference_logprobs_N=reference
    )


REFERENCE = torch.tensor([-1.5, -1.0, -0.5, -2.5])


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_the_policys_plus_the_weighted_kl(kind):
    logprobs, selected = batch(REFERENCE)
    loss, metrics = make_objective(make_algo(kl_coef=0.25, kl_kind=kind))(logprobs, selected)
    plain, _ = make_objective(make_algo())(logprobs, selected)
    kl_N = kl_estimate(logprobs.detach(), REFERENCE, kind)
    penalty = (selected.weight_N * kl_N).sum()
    assert loss.item() == pytest.approx((plain + 0.25 * penalty).item())
    assert metrics.totals["kl_loss"].item() == pytest.approx(penalty.item())
    assert metrics.sums["kl"].item() == pytest.approx(kl_estimate(logprobs.detach(), REFERENCE, "k3").sum().item())
    loss.backward()
    # Without an advantage the KL alone moves a token; where policy and reference agree, only k1 moves it.
    assert logprobs.grad[3] != 0
    assert (logprobs.grad[2] != 0) == (kind == "k1")


def test_without_a_coefficient_the_reference_is_not_looked_at():
    actual = []
    for reference in (None, torch.full((4,), torch.nan)):
        logprobs, selected = batch(reference)
        loss, metrics = make_objective(make_algo(kl_coef=0, kl_kind="k1"))(logprobs, selected)
        loss.backward()
        assert "kl" not in metrics.sums
        assert metrics.totals == {}
        actual.append((loss.item(), logprobs.grad.tolist()))
    assert actual[0] == actual[1]


def test_a_micro_batch_without_a_token_has_no_kl():
    empty = torch.zeros(0)
    loss, metrics = make_objective(make_algo(kl_coef=1.0))(
        torch.zeros(0, requires_grad=True), LossInput(empty, empty, empty, reference_logprobs_N=empty)
    )
    assert loss.item() == metrics.sums["kl"].item() == metrics.totals["kl_loss"].item() == 0


@pytest.mark.parametrize("options", [{"kl_coef": -0.1}, {"kl_coef": float("inf")}, {"kl_kind": "k4"}])
def test_values_that_mean_nothing_are_refused(options):
    with pytest.raises(ConfigError):
        make_algo(**options)
