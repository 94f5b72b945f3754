"""Means with confidence intervals, and pass@k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959963984540054
"""The 97.5% quantile of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95% confidence interval; there is none for fewer than two prompts."""

    value: float
    """The mean."""
    low: float | None = None
    """Lower end of the interval."""
    high: float | None = None
    """Upper end of the interval."""

    @property
    def ci95(self) -> float | None:
        """Distance to the farther end, so that ``value ± ci95`` contains the whole interval."""
        if self.low is None or self.high is None:
            return None
        return max(self.value - self.low, self.high - self.value)


def mean(values: Sequence[float]) -> float:
    """Return the mean, 0 for no values."""
    return sum(values) / len(values) if values else 0.0


def estimate(values_P_N: Sequence[Sequence[float]]) -> Estimate:
    """Return the mean of all values with its 95% interval: ``mean ± 1.96`` clustered standard errors.

    Of values from 0 to 1 it is Wilson's interval: the other has ends outside of 0 and 1, and is empty if all are equal. It is
    over the prompts if all values of a prompt are 0, or all 1, as with one sample a prompt; else over the number of
    independent samples with the same standard error, ``x̄ (1 − x̄) / SE²``.

    Args:
        values_P_N: for each prompt the values of its samples, at least one a prompt; prompts may differ in number.
    """
    flat = [value for values in values_P_N for value in values]
    middle, prompts = mean(flat), len(values_P_N)
    if prompts < 2:
        return Estimate(middle)
    sizes = {len(values) for values in values_P_N}
    if (len(sizes) == 1 or middle in (0.0, 1.0)) and all(set(values) in ({0.0}, {1.0}) for values in values_P_N):
        return Estimate(middle, *wilson(sum(values[0] for values in values_P_N), prompts))
    error = clustered_error(values_P_N)
    if error > 0 and all(0.0 <= value <= 1.0 for value in flat):
        independent = middle * (1 - middle) / error**2
        return Estimate(middle, *wilson(middle * independent, independent))
    return Estimate(middle, middle - Z95 * error, middle + Z95 * error)


def clustered_error(values_P_N: Sequence[Sequence[float]]) -> float:
    """Return the standard error of the mean of all values, which are correlated within a prompt.

    With ``G`` prompts, ``n`` values in all, ``x̄`` their mean and ``i`` going over the values of a prompt ``g``::

        SE² = G / (G − 1) · Σ_g (Σ_i (x_gi − x̄))² / n²

    the cluster-robust variance of a mean with its correction for few clusters (Cameron and Miller 2015, "A
    practitioner's guide to cluster-robust inference"), which E. Miller 2024 (arXiv:2411.00640, "Clustered standard
    errors") recommends for evaluations. With one value a prompt it is the usual ``s / √n``; with equally many it is the
    standard error of the prompts' means.

    Args:
        values_P_N: at least two prompts, at least one value each.
    """
    count = sum(len(values) for values in values_P_N)
    middle = math.fsum(value for values in values_P_N for value in values) / count
    squares = math.fsum(math.fsum(value - middle for value in values) ** 2 for values in values_P_N)
    prompts = len(values_P_N)
    return math.sqrt(prompts / (prompts - 1) * squares) / count


def wilson(successes: float, count: float) -> tuple[float, float]:
    """Return the 95% score interval of a rate (E. B. Wilson 1927, "Probable inference", J. Am. Stat. Assoc. 22:209).

    Unlike ``p ± 1.96 √(p(1−p)/n)`` it stays within 0 and 1, and is not empty if all or none succeeded.
    """
    rate, square = successes / count, Z95 * Z95
    middle = (rate + square / (2 * count)) / (1 + square / count)
    half = Z95 / (1 + square / count) * math.sqrt(rate * (1 - rate) / count + square / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the chance that at least one of ``k`` samples passes, estimated without bias from ``samples`` of them.

    ``1 − C(n − c, k) / C(n, k)``, equation 1 of Chen et al. 2021 (arXiv:2107.03374).

    Args:
        samples: ``n``, the samples that were drawn.
        passed: ``c``, how many of them passed.
        k: at least 1 and at most ``n``.
    """
    assert 1 <= k <= samples
    assert 0 <= passed <= samples
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def pass_ks(samples: int) -> list[int]:
    """Return the ``k`` to report: powers of two up to ``samples``, and ``samples`` itself."""
    powers = [1 << power for power in range(samples.bit_length())]
    return sorted({*powers, samples}) if samples else []
