"""The engine's random numbers: a hash of seed and position that must look like independent uniform draws."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from agentrl.inference.embedded.sampling import as_uint64, uniforms

WORD = (1 << 64) - 1
SEEDS, POSITIONS = 512, 512


def mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)


def split_mix(state: int, count: int) -> list[int]:
    """The published generator, stepped."""
    return [mix((state + step * 0x9E3779B97F4A7C15) & WORD) for step in range(1, count + 1)]


def grid(first: int, stride: int) -> NDArray[np.float64]:
    """Numbers of seeds a stride apart (rows) at the positions of a long prompt's output (columns)."""
    seeds = np.array([as_uint64(first + stride * step) for step in range(SEEDS)], np.uint64)
    positions = np.arange(100, 100 + POSITIONS, dtype=np.uint64)
    return uniforms(np.repeat(seeds, POSITIONS), np.tile(positions, SEEDS)).reshape(SEEDS, POSITIONS)


def test_the_generator_is_the_published_one() -> None:
    assert split_mix(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    seed = 99
    (start,) = split_mix(seed, 1)
    expected = [(word >> 11) / 2**53 for word in split_mix(start, 20)]
    assert uniforms(np.full(20, seed, np.uint64), np.arange(20, dtype=np.uint64)).tolist() == expected


@given(seed=st.integers(), position=st.integers(0, 2**40))
def test_any_seed_gives_a_number_below_one(seed: int, position: int) -> None:
    (number,) = uniforms(np.array([as_uint64(seed)], np.uint64), np.array([position], np.uint64))
    assert 0.0 <= number < 1.0


@pytest.mark.parametrize(("first", "stride"), [(0, 1), (2**31 - 600, 1), (7, 2**32), (0, 0x9E3779B97F4A7C15)])
def test_numbers_are_uniform_and_unrelated(first: int, stride: int) -> None:
    """Bounds are six standard deviations: of chi-square over bins and pairs of bins, and of correlations.

    The last stride is SplitMix64's own step: without the first hash, each seed's numbers were those of the one before,
    shifted.
    """
    numbers = grid(first, stride)
    pairs_along = (numbers[:, :-1], numbers[:, 1:])
    pairs_across = (numbers[:-1], numbers[1:])
    assert chi_square(np.bincount((numbers.ravel() * 256).astype(int), minlength=256)) < 6
    for lower, right in (pairs_along, pairs_across):
        cells = (lower * 16).astype(int) * 16 + (right * 16).astype(int)
        assert chi_square(np.bincount(cells.ravel(), minlength=256)) < 6
    for shift in range(-4, 5):
        below = np.roll(numbers[1:], shift, axis=1)
        assert abs(np.corrcoef(numbers[:-1].ravel(), below.ravel())[0, 1]) < 6 / np.sqrt(below.size), shift
    for lag in range(1, 9):
        lower, right = numbers[:, :-lag].ravel(), numbers[:, lag:].ravel()
        assert abs(np.corrcoef(lower, right)[0, 1]) < 6 / np.sqrt(lower.size), lag
    assert len(np.unique(numbers)) == numbers.size


def chi_square(counts: NDArray[np.int64]) -> float:
    """Return how many standard deviations the statistic lies above its mean."""
    expected = counts.sum() / len(counts)
    freedom = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def test_every_bit_of_seed_and_position_matters() -> None:
    """Flipping one bit of the input flips each of the 53 output bits about every second time."""
    rng = np.random.default_rng(0)
    seeds = rng.integers(2**63, size=2000).astype(np.uint64)
    positions = rng.integers(2**20, size=2000).astype(np.uint64)
    state_before = (uniforms(seeds, positions) * 2**53).astype(np.uint64)
    flips = [(np.uint64(1 << bit), np.uint64(0)) for bit in range(64)]
    flips += [(np.uint64(0), np.uint64(1 << bit)) for bit in range(20)]
    for seed_flip, position_flip in flips:
        state_after = (uniforms(seeds ^ seed_flip, positions ^ position_flip) * 2**53).astype(np.uint64)
        changed = ((state_before ^ state_after)[:, None] >> np.arange(53, dtype=np.uint64)) & np.uint64(1)
        assert np.abs(changed.mean(axis=0) - 0.5).max() < 6 * 0.5 / np.sqrt(2000)
