"""Estimators of the KL divergence between two policies, from sampled tokens."""

from __future__ import annotations

import torch

from agentrl.algo.base import MAX_LOG_RATIO
from agentrl.config.algo import KlKind

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
