"""How far a policy is from another, estimated from sampled tokens."""

from __future__ import annotations

import torch

from agentrl.config.algo import KlKind

MAX_LOG_RATIO = 20.0
"""The logarithm of reference over policy is held at this from above: e^20 still leaves room in float32."""
LOW_VAR_LIMIT = 10.0
"""Where ``low_var_kl`` is cut off."""


def kl_estimate(logprobs_N: torch.Tensor, reference_N: torch.Tensor, kind: KlKind) -> torch.Tensor:
    """Return one estimate of KL(policy ‖ reference) a token, from tokens that the policy sampled.

    With ``d = reference - logprob``, the logarithm of Schulman's ratio r ("Approximating KL Divergence",
    http://joschu.net/blog/kl-approx.html), value and derivative by ``logprob`` are::

        k1          -d             1          unbiased, of either sign
        k2          d² / 2         -d         biased
        k3          e^d - 1 - d    1 - e^d    unbiased, never negative (DeepSeekMath, arXiv:2402.03300, equation 4)
        low_var_kl  min(k3, 10)    1 - e^d    0 where cut off (verl's and slime's name and limit)

    That a value is unbiased says nothing of its gradient as a loss (Tang and Munos, arXiv:2506.09477). On fresh samples
    ``E[∇k1] = 0``, so k1 constrains nothing; ``E[∇k2] = ∇KL(policy ‖ reference)``; ``E[∇k3] = ∇KL(reference ‖ policy)``.
    Near the reference the last two agree to first order. ``d`` is held at `MAX_LOG_RATIO` from above, in k3 alone.

    Args:
        logprobs_N: the policy's, with gradient where one is wanted.
        reference_N: the reference's, without.
        kind: which.

    Returns:
        ``[N]``.

    """
    gap_N = reference_N - logprobs_N
    if kind == "k1":
        return -gap_N
    if kind == "k2":
        return gap_N.square() / 2
    # Not held from below: there the gradient is 1, and it is needed most where the reference would not go at all.
    gap_N = gap_N.clamp(max=MAX_LOG_RATIO)
    k3_N = gap_N.expm1() - gap_N
    return k3_N.clamp(max=LOW_VAR_LIMIT) if kind == "low_var_kl" else k3_N
