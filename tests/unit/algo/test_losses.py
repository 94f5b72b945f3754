"""Every loss against its formula in float64: the value of each token and, with the derivative by hand, its gradient.

References are scalar functions of one token: its ratio, advantage and log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.base import LossInput
from agentrl.algo.batch_loss import make_objective
from agentrl.algo.losses import POLICY_LOSSES
from tests.algo_config import make_algo

Floats = np.ndarray
Reference = Callable[[float, float, float, float], tuple[float, float]]
"""Loss and its derivative by the log-probability, of: log-ratio, advantage, new and old log-probability. With a ratio of
sequences, the log-ratio is the sequence's."""


def between(low: float, high: float, dual: float | None = None) -> Reference:
    """PPO: the ratio that counts stops at one end for each sign of the advantage."""

    def reference(gap: float, advantage: float, new: float, old: float) -> tuple[float, float]:
        ratio = math.exp(gap)
        bounded_ratio = min(ratio, 1 + high) if advantage > 0 else max(ratio, 1 - low)
        if dual is not None and advantage < 0:
            bounded_ratio = min(bounded_ratio, dual)
        return -bounded_ratio * advantage, -ratio * advantage if bounded_ratio == ratio else 0.0

    return reference


def cispo(high: float) -> Reference:
    def reference(gap: float, advantage: float, new: float, old: float) -> tuple[float, float]:
        weight = min(math.exp(gap), 1 + high)
        return -weight * advantage * new, -weight * advantage

    return reference


def reinforce(gap: float, advantage: float, new: float, old: float) -> tuple[float, float]:
    return -advantage * new, -advantage


def dppo(divergence: str, low: float, high: float, limit: float = 20.0) -> Reference:
    def reference(gap: float, advantage: float, new: float, old: float) -> tuple[float, float]:
        p, q = math.exp(old), math.exp(new)
        far = abs(p - q) if divergence == "tv" else p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        if (advantage > 0 and q > p and far > high) or (advantage <= 0 and q < p and far > low):
            return 0.0, 0.0
        weight = min(q / p, limit)
        return -weight * advantage * new, -weight * advantage

    return reference


CASES: dict[str, tuple[str, dict[str, object], Reference]] = {
    "ppo_clip": ("ppo_clip", {}, between(0.2, 0.2)),
    "clip-higher": ("ppo_clip", {"clip_low": 0.1, "clip_high": 0.28}, between(0.1, 0.28)),
    "dual clip": ("ppo_clip", {"dual_clip": 1.5}, between(0.2, 0.2, 1.5)),
    "gspo": ("gspo", {"clip_low": 0.05, "clip_high": 0.1}, between(0.05, 0.1)),
    "gspo_token": ("gspo_token", {"clip_low": 0.05, "clip_high": 0.1}, between(0.05, 0.1)),
    "cispo": ("cispo", {"clip_high": 0.3}, cispo(0.3)),
    "reinforce": ("reinforce", {}, reinforce),
    "dppo tv": ("dppo", {"clip_low": 0.05, "clip_high": 0.1}, dppo("tv", 0.05, 0.1)),
    "dppo kl": ("dppo", {"divergence": "kl", "clip_low": 0.01, "clip_high": 0.02}, dppo("kl", 0.01, 0.02)),
    "dppo, a low limit": ("dppo", {"ratio_limit": 1.2}, dppo("tv", 0.2, 0.2, 1.2)),
}


@dataclass(frozen=True)
class Tokens:
    """Tokens of sequences of any length, mixed."""

    new: Floats
    old: Floats
    advantages: Floats
    weights: Floats
    numbers: Floats

    @property
    def sequence_gaps(self) -> Floats:
        """The mean log-ratio of each token's sequence."""
        gaps = self.new - self.old
        return np.array([gaps[self.numbers == number].mean() for number in self.numbers])

    def given(self) -> LossInput:
        numbers = torch.from_numpy(self.numbers)
        return LossInput(
            weight_N=torch.from_numpy(self.weights),
            advantages_N=torch.from_numpy(self.advantages),
            logprobs_N=torch.from_numpy(self.old),
            sequence_N=numbers,
            sequence_size_N=torch.bincount(numbers)[numbers].double(),
        )


def make_tokens(seed: int, size: int = 120) -> Tokens:
    rng = np.random.default_rng(seed)
    numbers = rng.choice(12, size, p=np.arange(1, 13) / 78)
    old = -rng.exponential(1.5, size) - 0.01
    new = np.minimum(old + rng.normal(0, 0.4, size) + rng.normal(0, 0.1, 12)[numbers], -1e-3)
    advantages = rng.normal(size=size) * (rng.random(size) < 0.9)
    return Tokens(new, old, advantages, rng.random(size) / size, numbers)


def loss_and_gradient(
    algo: dict[str, object], tokens: Tokens, loss_input: LossInput | None = None
) -> tuple[float, Floats]:
    logprobs = torch.from_numpy(tokens.new).requires_grad_()
    loss, _ = make_objective(make_algo(**algo))(logprobs, loss_input or tokens.given())
    loss.backward()
    return loss.item(), logprobs.grad.numpy()


def wanted(name: str, reference: Reference, tokens: Tokens) -> tuple[Floats, Floats]:
    gaps = tokens.sequence_gaps if name.startswith("gspo") else tokens.new - tokens.old
    references = [reference(*values) for values in zip(gaps, tokens.advantages, tokens.new, tokens.old, strict=True)]
    return np.array([value for value, _ in references]), np.array([slope for _, slope in references])


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_the_papers(case):
    name, options, reference = CASES[case]
    for seed in range(3):
        tokens = make_tokens(seed)
        values, slopes = wanted(name, reference, tokens)
        loss, gradient = loss_and_gradient({"loss": {"name": name, "options": options}}, tokens)
        assert loss == pytest.approx((tokens.weights * values).sum(), rel=1e-9)
        assert gradient == pytest.approx(tokens.weights * slopes, rel=1e-9, abs=1e-15)
        moving = np.count_nonzero(slopes[tokens.advantages != 0]) / np.count_nonzero(tokens.advantages)
        assert moving > 0.3
        assert (moving == 1) == (name in ("cispo", "reinforce"))


def test_gspo_is_the_objective_of_whole_sequences():
    """Equation 5 of the paper, with the gradient by central differences."""
    tokens, low, high = make_tokens(4), 0.05, 0.1
    sizes = np.bincount(tokens.numbers)[tokens.numbers]
    groups = len(set(tokens.numbers.tolist()))
    one_each = np.random.default_rng(0).normal(size=12)[tokens.numbers]
    tokens = replace(tokens, advantages=one_each, weights=1 / (groups * sizes))

    def objective(new: Floats) -> float:
        total = 0.0
        for number in sorted(set(tokens.numbers.tolist())):
            chosen = tokens.numbers == number
            ratio = math.exp((new - tokens.old)[chosen].mean())
            advantage = one_each[chosen][0]
            total -= min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        return total / groups

    steps = 1e-6 * np.eye(len(tokens.new))
    slopes = [(objective(tokens.new + step) - objective(tokens.new - step)) / 2e-6 for step in steps]
    algo = {"loss": {"name": "gspo", "options": {"clip_low": low, "clip_high": high}}}
    loss, gradient = loss_and_gradient(algo, tokens)
    assert loss == pytest.approx(objective(tokens.new), rel=1e-9)
    assert gradient == pytest.approx(np.array(slopes), abs=1e-8)
    assert 0 < np.count_nonzero(gradient) < len(gradient)


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_a_sequence_ratio_that_ranks_computed_is_the_one_of_the_loss(name):
    tokens = make_tokens(5)
    algo = {"loss": {"name": name, "options": {"clip_low": 0.05, "clip_high": 0.1}}}
    loss, gradient = loss_and_gradient(algo, tokens)
    is_even = tokens.numbers % 2 == np.arange(len(tokens.numbers)) % 2  # cuts through sequences
    gaps, losses, joined = tokens.sequence_gaps, [], np.zeros(len(is_even))
    for chosen in (is_even, ~is_even):
        share = Tokens(
            *(values[chosen] for values in (tokens.new, tokens.old, tokens.advantages, tokens.weights)),
            tokens.numbers[chosen],
        )
        actual_gradient, joined[chosen] = loss_and_gradient(
            algo, share, replace(share.given(), sequence_log_ratio_N=torch.from_numpy(gaps[chosen]))
        )
        losses.append(actual_gradient)
    assert sum(losses) == pytest.approx(loss, rel=1e-9)
    assert joined == pytest.approx(gradient, rel=1e-9)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize("case", ["ppo_clip", "gspo", "cispo", "dppo tv"])
def test_the_objective_adds_kl_and_entropy_to_the_corrected_loss(case, kind):
    name, options, reference = CASES[case]
    tokens, rng = make_tokens(6), np.random.default_rng(1)
    values, slopes = wanted(name, reference, tokens)
    correction, entropy = rng.random(len(values)) * 2, rng.random(len(values))
    correction[::5] = 0.0  # rejected
    against = tokens.new + rng.normal(0, 1, len(values))
    gap = against - tokens.new
    kl, kl_slopes = {
        "k1": (-gap, np.ones_like(gap)),
        "k2": (gap**2 / 2, -gap),
        "k3": (np.exp(gap) - 1 - gap, 1 - np.exp(gap)),
        "low_var_kl": (np.minimum(np.exp(gap) - 1 - gap, 10), np.where(np.exp(gap) - 1 - gap < 10, 1 - np.exp(gap), 0)),
    }[kind]
    logprobs = replace(
        tokens.given(),
        correction_N=torch.from_numpy(correction),
        reference_logprobs_N=torch.from_numpy(against),
        entropy_N=torch.from_numpy(entropy),
    )
    algo = {"loss": {"name": name, "options": options}, "kl_coef": 0.3, "kl_kind": kind, "entropy_coef": 0.2}
    loss, gradient = loss_and_gradient(algo, tokens, logprobs)
    assert loss == pytest.approx((tokens.weights * (correction * values + 0.3 * kl - 0.2 * entropy)).sum(), rel=1e-9)
    assert gradient == pytest.approx(tokens.weights * (correction * slopes + 0.3 * kl_slopes), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_every_loss_has_the_policy_gradient(name):
    tokens = make_tokens(7)
    _, gradient = loss_and_gradient({"loss": {"name": name}}, replace(tokens, old=tokens.new))
    assert gradient == pytest.approx(-tokens.weights * tokens.advantages, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@given(st.lists(st.tuples(st.floats(-1e4, 0), st.floats(-1e4, 0), st.floats(-5, 5)), min_size=1, max_size=6))
def test_no_log_probabilities_make_a_loss_or_a_gradient_infinite(name, values):
    new, old, advantages = (torch.tensor(column) for column in zip(*values, strict=True))
    numbers = torch.arange(len(new)) // 2
    loss_input = LossInput(
        torch.ones(len(new)),
        advantages,
        old,
        numbers,
        torch.bincount(numbers)[numbers].float(),
        reference_logprobs_N=old,
    )
    for options in ({"kl_coef": 0.1}, {"old_logprobs": "learner", "correction": {"rollout_is": "token"}}):
        logprobs = new.clone().requires_grad_()
        loss, metrics = make_objective(make_algo(loss={"name": name}, **options))(logprobs, loss_input)
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(logprobs.grad).all()
        assert all(math.isfinite(value) for value in [*metrics.sums.values(), *metrics.maxima.values()])
