"""Group-relative advantages. Legend: ``N`` rollouts, ``G`` groups."""

from __future__ import annotations

import torch


def group_relative(
    rewards_N: torch.Tensor, groups_N: torch.Tensor, *, std_normalise: bool, eps: float = 1e-6
) -> torch.Tensor:
    """Return ``r - mean(group)``, divided by ``std(group) + eps`` if ``std_normalise`` (DeepSeekMath, arXiv:2402.03300, 4.1.2).

    The standard deviation is the population's. Groups may have any sizes and any order. A group whose rewards are
    all equal, or that has one rollout, gets exact zeros, so that rounding in the mean does not become a gradient.

    Args:
        rewards_N: float ``[N]``.
        groups_N: int64 ``[N]``, the group of each rollout, numbered from 0.
        std_normalise: whether to divide.
        eps: added to the standard deviation.

    Returns:
        float32 ``[N]``.

    Raises:
        ValueError: the shapes differ, or a reward is not finite.

    """
    if rewards_N.shape != groups_N.shape or rewards_N.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards_N.shape)} and groups {tuple(groups_N.shape)} must be [N] both")
    rewards_N = rewards_N.double()
    if not bool(torch.isfinite(rewards_N).all()):
        bad = int((~torch.isfinite(rewards_N)).nonzero()[0])
        raise ValueError(f"reward {rewards_N[bad].item()} of rollout {bad} is not finite")
    if rewards_N.numel() == 0:
        return rewards_N.float()
    centred_N = rewards_N - _per_group(rewards_N, groups_N, "mean")
    if std_normalise:
        centred_N = centred_N / (_per_group(centred_N.square(), groups_N, "mean").sqrt() + eps)
    flat_N = _per_group(rewards_N, groups_N, "amin") == _per_group(rewards_N, groups_N, "amax")
    return centred_N.masked_fill(flat_N, 0.0).float()


def _per_group(values_N: torch.Tensor, groups_N: torch.Tensor, reduce: str) -> torch.Tensor:
    """Return the reduced value of each rollout's group, ``[N]``."""
    out_G = values_N.new_zeros(int(groups_N.max()) + 1)
    return out_G.scatter_reduce(0, groups_N, values_N, reduce, include_self=False)[groups_N]
