"""On-policy distillation: the reverse KL divergence to teachers, by token, as an advantage.

``log π(token) - log π_teacher(token)`` of a token that the policy sampled is the estimate k1 of its reverse KL divergence
(Thinking Machines, "On-Policy Distillation", 2025). Its negative, times a coefficient, is the token's advantage, with no
return from later tokens: a discount of 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from agentrl.algo.base import RowValues
from agentrl.batch.sequences import group_sequences
from agentrl.core.types import Row, RowKey


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
