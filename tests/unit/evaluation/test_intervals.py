"""The arithmetic of evaluations, against brute force."""

import itertools
import math
import random
import statistics
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agentrl.evaluation.intervals import Z95, Estimate, clustered_error, estimate, pass_at_k, pass_ks, wilson
from agentrl.evaluation.table import format_estimate

VALUES = st.floats(-10, 10, allow_nan=False).map(lambda value: round(value, 3))
PROMPTS = st.lists(st.lists(VALUES, min_size=1, max_size=5), min_size=2, max_size=8)


@given(outcomes=st.lists(st.booleans(), min_size=1, max_size=9), data=st.data())
def test_pass_at_k_is_the_share_of_all_choices_that_hold_a_pass(outcomes: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(outcomes)))
    choices = list(itertools.combinations(outcomes, k))
    share = Fraction(sum(any(choice) for choice in choices), len(choices))
    assert pass_at_k(len(outcomes), sum(outcomes), k) == pytest.approx(float(share), abs=1e-12)


@given(samples=st.integers(1, 24), chance=st.floats(0, 1), data=st.data())
def test_pass_at_k_is_unbiased(samples: int, chance: float, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, samples))
    expected = math.fsum(
        math.comb(samples, passed) * chance**passed * (1 - chance) ** (samples - passed) * pass_at_k(samples, passed, k)
        for passed in range(samples + 1)
    )
    assert expected == pytest.approx(1 - (1 - chance) ** k, abs=1e-9)


def test_pass_at_k_of_many_samples_does_not_overflow() -> None:
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)
    assert pass_at_k(100_000, 0, 1) == 0.0
    assert pass_at_k(100_000, 50_001, 50_000) == 1.0


@given(samples=st.integers(1, 200))
def test_the_ks_are_powers_of_two_and_the_number_itself(samples: int) -> None:
    ks = pass_ks(samples)
    assert ks == sorted(set(ks))
    assert ks[0] == 1
    assert ks[-1] == samples
    assert all(k.bit_count() == 1 for k in ks[:-1])
    assert {1 << power for power in range(20) if 1 << power <= samples} <= set(ks)


@given(prompts=PROMPTS)
def test_clustered_error_is_the_sum_over_all_pairs_of_a_prompt(prompts: list[list[float]]) -> None:
    count, groups = sum(map(len, prompts)), len(prompts)
    middle = sum(map(sum, prompts)) / count
    pairs = sum((a - middle) * (b - middle) for values in prompts for a in values for b in values)
    expected = math.sqrt(max(0.0, groups / (groups - 1) * pairs)) / count
    assert clustered_error(prompts) == pytest.approx(expected, rel=1e-6, abs=1e-7)


@given(values=st.lists(VALUES, min_size=2, max_size=20))
def test_with_one_value_a_prompt_it_is_the_usual_error(values: list[float]) -> None:
    expected = statistics.stdev(values) / math.sqrt(len(values))
    assert clustered_error([[value] for value in values]) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(size=st.integers(1, 5), data=st.data())
def test_with_equally_many_values_it_is_the_error_of_the_prompts_means(size: int, data: st.DataObject) -> None:
    prompts = data.draw(st.lists(st.lists(VALUES, min_size=size, max_size=size), min_size=2, max_size=8))
    means = [statistics.fmean(values) for values in prompts]
    expected = statistics.stdev(means) / math.sqrt(len(means))
    assert clustered_error(prompts) == pytest.approx(expected, rel=1e-6, abs=1e-7)


@given(prompts=PROMPTS, copies=st.integers(2, 5))
def test_asking_the_same_again_makes_nothing_more_certain(prompts: list[list[float]], copies: int) -> None:
    again = [values * copies for values in prompts]
    assert clustered_error(again) == pytest.approx(clustered_error(prompts), rel=1e-6, abs=1e-9)


@given(prompts=PROMPTS, scale=st.floats(0.1, 10), shift=st.floats(-5, 5))
def test_the_interval_moves_and_grows_with_the_values(prompts: list[list[float]], scale: float, shift: float) -> None:
    moved = [[scale * value + shift for value in values] for values in prompts]
    assume(
        all(
            any(not 0 <= value <= 1 for values in group_values for value in values) for group_values in (prompts, moved)
        )
    )
    state_before, state_after = estimate(prompts), estimate(moved)
    assert state_after.value == pytest.approx(scale * state_before.value + shift, abs=1e-6)
    assert state_after.ci95 == pytest.approx(scale * (state_before.ci95 or 0.0), abs=1e-6)


@given(count=st.integers(1, 2000), data=st.data())
def test_wilson_ends_where_the_score_test_rejects(count: int, data: st.DataObject) -> None:
    passed = data.draw(st.integers(0, count))
    rate = passed / count
    low, high = wilson(passed, count)
    assert 0.0 <= low <= rate + 1e-12
    assert rate - 1e-12 <= high <= 1.0
    for end in (low, high):
        assert abs(rate - end) == pytest.approx(Z95 * math.sqrt(end * (1 - end) / count), abs=1e-6)
    assert high - low > 0


def test_wilson_of_a_published_example() -> None:
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4), "Newcombe 1998, Stat. Med. 17:857, method 3"
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=1e-4)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=1e-4)


def test_rates_with_one_sample_get_wilsons_interval_and_others_do_not() -> None:
    rate = estimate([[1.0], [1.0], [1.0], [1.0]])
    assert (rate.low, rate.high) == wilson(4, 4)
    assert rate.ci95 == pytest.approx(1.0 - wilson(4, 4)[0]), "the farther end"
    assert estimate([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]) == estimate([[1.0], [0.0], [0.0]]), "samples that all agree"
    assert estimate([[0.5], [3.0]]).ci95 == pytest.approx(Z95 * 1.25)


@given(
    st.lists(
        st.lists(st.floats(0, 1).map(lambda value: round(value, 2)), min_size=1, max_size=5), min_size=2, max_size=8
    )
)
def test_the_interval_of_values_from_0_to_1_is_in_0_to_1(prompts: list[list[float]]) -> None:
    result = estimate(prompts)
    assert result.low is not None
    assert result.high is not None
    assert 0.0 <= result.low <= result.value + 1e-12
    assert result.value - 1e-12 <= result.high <= 1.0
    assert result.high > result.low or len({value for values in prompts for value in values}) == 1


def test_with_many_values_the_interval_of_a_rate_is_that_of_the_clustered_error() -> None:
    prompts = [[1.0, 0.0, 1.0, 1.0]] * 300 + [[1.0, 1.0, 1.0, 0.0], [0.0] * 4] * 100
    result = estimate(prompts)
    half = Z95 * clustered_error(prompts)
    assert (result.low, result.high) == pytest.approx((result.value - half, result.value + half), abs=1e-3)


def test_what_is_not_equally_far_from_both_ends_is_shown_as_an_interval() -> None:
    assert format_estimate(estimate([[0.0]] * 4)) == "0.000 [0.000, 0.490]"
    assert format_estimate(estimate([[0.0] * 3, [0.0], [0.0], [0.0]])) == "0.000 [0.000, 0.490]"
    assert format_estimate(estimate([[0.5], [3.0]])) == "1.750 ±2.450"
    assert format_estimate(estimate([[1.0], [0.0]])) == "0.500 ±0.405"
    assert format_estimate(estimate([[1.0]])) == "1.000"


def test_one_prompt_has_a_mean_and_no_interval() -> None:
    assert estimate([[1.0, 0.0]]) == Estimate(0.5)
    assert estimate([]) == Estimate(0.0)
    assert Estimate(0.5).ci95 is None


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Four samples each of 60 prompts that differ in difficulty: the interval that ignores prompts is too narrow."""
    draw = random.Random(0)
    trials, covered, naive = 600, 0, 0
    for _ in range(trials):
        chances = [draw.choice((0.1, 0.9)) for _ in range(60)]  # the mean over all prompts there could be is 0.5
        prompts = [[float(draw.random() < chance) for _ in range(4)] for chance in chances]
        actual_estimate = estimate(prompts)
        assert actual_estimate.ci95 is not None
        covered += abs(actual_estimate.value - 0.5) <= actual_estimate.ci95
        flat = [[value] for values in prompts for value in values]
        naive += abs(actual_estimate.value - 0.5) <= Z95 * clustered_error(flat)
    assert 0.92 < covered / trials < 0.98
    assert naive / trials < 0.85
