"""Importance weights and rejected tokens against plain loops over the sequences of ragged rollouts, in float64.

Weights are those of the driver (`step_correction`), at the places of sampled tokens; or, where every token counts alone, those
that the objective multiplies the loss with.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.base import LossInput
from agentrl.algo.batch_loss import make_objective
from agentrl.algo.correction import find_beyond_second_moment
from agentrl.config.algo import CorrectionConfig
from agentrl.config.load import validate
from agentrl.train.step_scores import StepScores
from tests.unit.algo.ragged import Ragged, make_ragged

Gaps = list[list[float]]
"""Of each sequence: the learner's log-probability of each token, minus the engine's."""
KINDS = (
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
)  # fmt: skip
LEVELS = {"token": "token", "geometric": "mean", "sequence": "sum"}


def of_level(values: list[float], level: str) -> list[float]:
    """Return each value, or for every one of them their sum, mean or largest."""
    reduced = {"sum": sum(values), "mean": sum(values) / len(values), "max": max(values)}
    return values if level == "token" else [reduced[level]] * len(values)


def importance(gaps: Gaps, level: str, upper: float, lower: float | None, normalise: bool) -> Gaps:
    weights_by_row = []
    for row_gaps in gaps:
        ratios = [math.exp(gap) for gap in of_level(row_gaps, LEVELS[level])]
        if lower is None:
            weights_by_row.append([min(ratio, upper) for ratio in ratios])
        else:
            weights_by_row.append([ratio if lower <= ratio <= upper else 0.0 for ratio in ratios])
    if normalise:
        counted = [weight for row_gaps in weights_by_row for weight in (row_gaps if level == "token" else row_gaps[:1])]
        mean = sum(counted) / len(counted)
        weights_by_row = [[weight / mean for weight in row_gaps] for row_gaps in weights_by_row]
    return weights_by_row


def kept(gaps: Gaps, kind: str, threshold: float) -> Gaps:
    estimate = {
        "k1": lambda gap: -gap,
        "k2": lambda gap: gap**2 / 2,
        "k3": lambda gap: math.exp(gap) - 1 - gap,
    }[kind[-2:]]
    level = kind[:-3].removeprefix("seq_")
    limit = math.log(threshold) if kind.endswith("k1") else threshold
    return [
        [float(abs(value) <= limit) for value in of_level([estimate(gap) for gap in row_gaps], level)]
        for row_gaps in gaps
    ]


def fewest_largest(gaps: Gaps, threshold: float) -> Gaps:
    """Take away the largest squared log-ratio until the mean of the others is small enough."""
    squares = sorted(gap**2 for row_gaps in gaps for gap in row_gaps)
    while squares and sum(squares) / len(squares) > threshold:
        squares.pop()
    return [[float(bool(squares) and gap**2 <= squares[-1]) for gap in row_gaps] for row_gaps in gaps]


def weights(correction: dict[str, object], data: Ragged, learner: dict) -> list[np.ndarray]:
    """Return the weights of each sequence, from the driver or, where it computes none, from the objective."""
    config = validate({"algo": {"old_logprobs": "learner", "loss": {"name": "reinforce"}, "correction": correction}})
    weights_of_rows = StepScores(learner).correction(config.algo.correction, data.groups)
    if weights_of_rows is not None:
        assert all(not values[row.mask == 0].any() for row in data.rows for values in [weights_of_rows[row.key]])
        return [sequence.of(weights_of_rows) for sequence in data.sequences]
    of_objective = []
    for sequence in data.sequences:
        new = torch.tensor(sequence.of(learner), requires_grad=True)
        ones, engine = (
            torch.ones_like(new.detach()),
            torch.tensor(sequence.of({row.key: row.logprobs for row in data.rows})),
        )
        loss, metrics = make_objective(config.algo)(
            new, LossInput(ones, ones, engine, learner_logprobs_N=torch.tensor(sequence.of(learner)))
        )
        loss.backward()  # of reinforce, minus the weight
        of_objective.append(-new.grad.numpy())
        assert metrics.sums["correction_rejected"] == np.count_nonzero(new.grad.numpy() == 0)
    return of_objective


def case(seed: int, spread: float = 0.4) -> tuple[Ragged, dict, Gaps]:
    data = make_ragged(seed, agents=3)
    rng = np.random.default_rng([seed, 2])
    learner = {row.key: (row.logprobs + rng.normal(0, spread, len(row.mask))).astype(np.float32) for row in data.rows}
    engine = {row.key: row.logprobs for row in data.rows}
    return data, learner, [(sequence.of(learner) - sequence.of(engine)).tolist() for sequence in data.sequences]


def compare(actual: list[np.ndarray], expected: Gaps, shares: tuple[float, float] = (0.0, 1.0)) -> None:
    """Compare, with what share of the tokens must have weight 0."""
    for row_weights, values in zip(actual, expected, strict=True):
        assert row_weights == pytest.approx(np.array(values), rel=1e-6, abs=1e-9)
    share = np.mean(np.concatenate(actual) == 0)
    assert shares[0] <= share <= shares[1]


@pytest.mark.parametrize("normalise", [False, True], ids=["", "normalised"])
@pytest.mark.parametrize("lower", [None, 0.7], ids=["truncated", "masked"])
@pytest.mark.parametrize("level", LEVELS)
def test_importance_weights_are_the_ratios_within_their_limits(level, lower, normalise):
    for seed in range(2):
        data, learner, gaps = case(seed)
        settings = {"rollout_is": level, "rollout_is_threshold": 1.3, "rollout_is_lower": lower}
        actual = weights(settings | {"rollout_is_batch_normalize": normalise}, data, learner)
        expected = importance(gaps, level, 1.3, lower, normalise)
        compare(actual, expected, (0.0, 0.0) if lower is None else (0.01, 0.9))
        assert max(map(max, expected)) > 1 > min(map(min, expected))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_rejected_by_their_divergence(kind):
    threshold = 1.3 if kind.endswith("k1") else 0.8 if "sum" in kind else 0.1
    for seed in range(2):
        data, learner, gaps = case(seed)
        actual_weights = weights(
            {"rollout_is": "none", "rollout_rs": [kind], "rollout_rs_threshold": threshold}, data, learner
        )
        compare(actual_weights, kept(gaps, kind, threshold), (0.01, 0.99))


def test_m2po_leaves_out_the_fewest_tokens():
    for seed, threshold in itertools.product(range(2), (0.01, 0.04, 0.1, 10.0)):
        data, learner, gaps = case(seed)
        actual_weights = weights({"rollout_is": "none", "m2po_threshold": threshold}, data, learner)
        compare(actual_weights, fewest_largest(gaps, threshold))


def test_all_kinds_together_multiply():
    data, learner, gaps = case(9)
    settings = {"rollout_is": "sequence", "rollout_is_threshold": 3.0, "rollout_is_batch_normalize": True}
    rejects = {"rollout_rs": ["token_k1", "seq_mean_k3"], "rollout_rs_threshold": 1.5, "m2po_threshold": 0.1}
    actual_weights = weights(settings | rejects, data, learner)
    factors = [
        importance(gaps, "sequence", 3.0, None, True),
        kept(gaps, "token_k1", 1.5), kept(gaps, "seq_mean_k3", 1.5), fewest_largest(gaps, 0.1),
    ]  # fmt: skip
    compare(actual_weights, [np.prod(parts, axis=0).tolist() for parts in zip(*factors, strict=True)], (0.01, 0.9))


def test_every_kind_is_tested():
    kinds = CorrectionConfig.model_fields["rollout_rs"].annotation
    assert set(KINDS) == set(kinds.__args__[0].__args__)


@given(st.lists(st.floats(-30, 30), max_size=30), st.floats(1e-6, 100))
def test_what_m2po_keeps_is_within_the_threshold_and_one_more_would_not_be(gaps, threshold):
    squares = np.array(gaps) ** 2
    beyond = find_beyond_second_moment(torch.tensor(gaps, dtype=torch.float64), threshold).numpy()
    if not beyond.all():
        assert squares[~beyond].mean() <= threshold * (1 + 1e-9)
    if beyond.any():
        assert np.append(squares[~beyond], squares[beyond].min()).mean() > threshold * (1 - 1e-9)


@given(st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=8))
def test_weights_are_finite_whatever_the_gap(gaps):
    data = make_ragged(0, sizes=(1,), agents=1, dropped=0)
    places = [position for sequence in data.sequences for position in sequence.places]
    learner = {row.key: row.logprobs.copy() for row in data.rows}
    for (key, position), gap in zip(places, itertools.cycle(gaps), strict=False):
        learner[key][position] += gap
    for level in LEVELS:
        actual_weights = weights({"rollout_is": level, "rollout_is_threshold": 1e9}, data, learner)
        assert all(np.isfinite(sequence).all() for sequence in actual_weights)
