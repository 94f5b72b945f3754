"""Estimators of the KL divergence between two policies, from sampled tokens, and on-policy distillation from teachers.

``log π(token) - log π_teacher(token)`` of a token that the policy sampled is the estimate k1 of its reverse KL divergence
(Thinking Machines, "On-Policy Distillation", 2025). Its negative, times a coefficient, is the token's advantage, with no
return from later tokens: a discount of 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.algo.base import MAX_LOG_RATIO, RowValues
from agentrl.batch.sequences import group_sequences
from agentrl.config.algo import KlKind
from agentrl.core.types import Row, RowKey

LOW_VAR_LIMIT = 10.0
"""Upper limit of ``low_var_kl``."""


def kl_estimate(logprobs_N: torch.Tensor, reference_N: torch.Tensor, kind: KlKind) -> torch.Tensor:
    """Return an estimate of KL(policy ‖ reference) per token, from tokens that the policy sampled.

    With ``d = reference - logprob``, the logarithm of Schulman's ratio r ("Approximating KL Divergence",
    http://joschu.net/blog/kl-approx.html), value and derivative by ``logprob`` are::

        k1          -d             1          unbiased, of either sign
        k2          d² / 2         -d         biased
        k3          e^d - 1 - d    1 - e^d    unbiased, never negative (DeepSeekMath, arXiv:2402.03300, equation 4)
        low_var_kl  min(k3, 10)    1 - e^d    0 where cut off (verl's and slime's name and limit)

    An unbiased value does not imply a useful gradient as a loss (Tang and Munos, arXiv:2506.09477). On fresh samples
    ``E[∇k1] = 0``, so k1 constrains nothing; ``E[∇k2] = ∇KL(policy ‖ reference)``; ``E[∇k3] = ∇KL(reference ‖ policy)``.
    Near the reference the last two agree to first order. ``d`` is clamped to at most `MAX_LOG_RATIO`, in k3 only.

    Args:
        logprobs_N: of the policy, with a gradient if one is needed.
        reference_N: of the reference, without gradient.
        kind: of the estimator.

    Returns:
        ``[N]``.
    """
    gap_N = reference_N - logprobs_N
    if kind == "k1":
        return -gap_N
    if kind == "k2":
        return gap_N.square() / 2
    # Not clamped from below: the gradient there is 1, and is needed most for tokens that the reference would never sample.
    gap_N = gap_N.clamp(max=MAX_LOG_RATIO)
    k3_N = gap_N.expm1() - gap_N
    return k3_N.clamp(max=LOW_VAR_LIMIT) if kind == "low_var_kl" else k3_N


def teacher_gaps(
    rows: Sequence[Row], policy: RowValues, teachers: Mapping[str, RowValues], weights: Mapping[str, float]
) -> dict[RowKey, NDArray[np.float32]]:
    """Return ``log π - mean of log π_teacher`` of each token, ``[T]`` by row; 0 in rows that no teacher has scored.

    The mean of the teachers that have scored a row is weighted: its expectation is the same mean of the KL divergences.

    Args:
        rows: of the training step.
        policy: log-probabilities of the policy, of every row.
        teachers: log-probabilities by teacher, of the rows that each has scored.
        weights: of the teachers.
    """
    gaps = {}
    for row in rows:
        row_weights = {name: weights[name] for name, logprobs in teachers.items() if row.key in logprobs}
        gap_T = np.zeros(len(row.mask))
        for name, weight in row_weights.items():
            teacher_T = np.asarray(teachers[name][row.key], np.float64)
            gap_T += weight / sum(row_weights.values()) * (np.asarray(policy[row.key], np.float64) - teacher_T)
        gaps[row.key] = gap_T.astype(np.float32)
    return gaps


def teacher_metrics(
    rows: Sequence[Row], policy: RowValues, teachers: Mapping[str, RowValues], gaps: RowValues
) -> dict[str, float]:
    """Return the mean of ``log π - log π_teacher`` over trained tokens: of all, and of those that each teacher has scored."""
    means = {"train/teacher_kl": _mean(rows, gaps)}
    for name, logprobs in teachers.items():
        differences = {key: policy[key] - teacher_T for key, teacher_T in logprobs.items()}
        means[f"train/teacher_kl/{name}"] = _mean([row for row in rows if row.key in logprobs], differences)
    return means


def _mean(rows: Sequence[Row], values: RowValues) -> float:
    tokens_N = np.concatenate([np.zeros(0), *(sequence.gather(values) for sequence in group_sequences(rows))])
    return float(tokens_N.mean()) if len(tokens_N) else 0.0
