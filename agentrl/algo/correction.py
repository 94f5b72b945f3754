"""Correction of the gap between the engine that sampled and the learner: importance weights, and tokens that are rejected.

The engine computes with other kernels and in another precision than the learner, or with older weights, so that its
log-probability of a token differs. Names and formulas are those of verl's rollout correction; ``log_ratio`` is the learner's
log-probability minus the engine's. Legend: ``N`` tokens, ``sequence_N`` the number of each token's sequence.
"""

from __future__ import annotations

import math

import torch

from agentrl.algo.base import MAX_LOG_RATIO, over_sequences
from agentrl.config.algo import CorrectionConfig, RejectionKind


def importance_weights(log_ratio_N: torch.Tensor, sequence_N: torch.Tensor, config: CorrectionConfig) -> torch.Tensor:
    """Return the weight of each token: a truncated or masked importance ratio, 0 where the token is rejected.

    ``token`` weights are ``min(e^d, C)`` (truncated importance sampling, https://fengyao.notion.site/off-policy-rl), with
    d the log-ratio; ``geometric`` and ``sequence`` take its mean or sum over the sequence. With ``rollout_is_lower`` a weight
    outside ``[lower, C]`` is 0 (IcePop, Ling Team, arXiv:2510.18855).

    Args:
        log_ratio_N: of all tokens of the sequences, and of the training step if the weights are normalised.
        sequence_N: int64.
        config: levels and limits. ``auto`` must be resolved.

    Returns:
        float32 ``[N]``, without gradient.
    """
    assert config.rollout_is != "auto", "the configuration resolves it"
    weights_N = torch.ones_like(log_ratio_N)
    if config.rollout_is != "none":
        level_N = log_ratio_N
        if config.rollout_is != "token":
            level_N = over_sequences(log_ratio_N, sequence_N, "sum" if config.rollout_is == "sequence" else "mean")
        weights_N = level_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        if config.rollout_is_lower is None:
            weights_N = weights_N.clamp(max=config.rollout_is_threshold)
        else:
            outside_N = (weights_N < config.rollout_is_lower) | (weights_N > config.rollout_is_threshold)
            weights_N = weights_N.masked_fill(outside_N, 0.0)
        if config.rollout_is_batch_normalize and len(weights_N):
            counted_N = torch.ones_like(weights_N)
            if config.rollout_is != "token":  # every sequence counts once
                counted_N = 1 / over_sequences(counted_N, sequence_N, "sum")
            mean = (counted_N * weights_N).sum() / counted_N.sum()
            weights_N = weights_N / mean if mean > 0 else weights_N
    for kind in config.rollout_rs:
        weights_N = weights_N.masked_fill(
            find_rejected(log_ratio_N, sequence_N, kind, config.rollout_rs_threshold), 0.0
        )
    if config.m2po_threshold is not None:
        weights_N = weights_N.masked_fill(find_beyond_second_moment(log_ratio_N, config.m2po_threshold), 0.0)
    return weights_N.float()


def effective_sample_size(total: float, squares: float, count: float) -> float:
    """Return the effective sample size of weights as a share of their number: ``(Σw)² / (n Σw²)``.

    1 if all weights are equal, 1 / n if a single one is not 0 (Kish, "Survey Sampling", 1965).

    Args:
        total: sum of the weights, which are at least 0.
        squares: sum of their squares.
        count: their number, ``n``; without any weight the result is 0.
    """
    return total**2 / (count * squares) if squares else 0.0


def find_rejected(
    log_ratio_N: torch.Tensor, sequence_N: torch.Tensor, kind: RejectionKind, threshold: float
) -> torch.Tensor:
    """Return where a divergence exceeds the threshold, bool ``[N]``.

    With d the log-ratio: k1 is ``-d``, which must be within ``±log(threshold)``; k2 is ``d² / 2`` and k3 ``e^d - 1 - d``,
    which must be at most ``threshold``. ``token_`` is each token's; ``seq_sum_``, ``seq_mean_`` and ``seq_max_`` are over a
    sequence, of which then all tokens are rejected (geometric: ``seq_mean_k1``).
    """
    gap_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    level, _, estimator = kind.rpartition("_")
    divergence_N = {"k1": -gap_N, "k2": gap_N.square() / 2, "k3": gap_N.expm1() - gap_N}[estimator]
    if level != "token":
        divergence_N = over_sequences(
            divergence_N, sequence_N, {"seq_sum": "sum", "seq_mean": "mean", "seq_max": "amax"}[level]
        )
    return divergence_N.abs() > math.log(threshold) if estimator == "k1" else divergence_N > threshold


def find_beyond_second_moment(log_ratio_N: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return the fewest tokens without which the mean squared log-ratio of the others is at most ``threshold``, bool ``[N]``.

    Source: M2PO, arXiv:2510.01161, algorithm 1.
    """
    squares_N, order_N = log_ratio_N.square().sort(stable=True)
    means_N = squares_N.cumsum(0) / torch.arange(1, len(squares_N) + 1, device=squares_N.device)
    kept_tokens = int((means_N <= threshold).sum())  # the means grow with the sorted squares
    beyond_N = torch.zeros_like(squares_N, dtype=torch.bool)
    beyond_N[order_N[kept_tokens:]] = True
    return beyond_N
