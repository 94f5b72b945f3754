"""The age of trained tokens: its metrics, and masks of old ones; the lag of evaluated tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from agentrl.core.types import MaskReason, Rollout, Row


def staleness_metrics(rollouts: Iterable[Rollout], version: int) -> dict[str, float]:
    """Return mean, 95th percentile and maximum of the age of the trained tokens, in policy versions, and that of long rollouts.

    Args:
        rollouts: of a step; dropped ones do not count.
        version: the policy that the step trains.
    """
    trained = [rollout for rollout in rollouts if not rollout.dropped]
    rows = [row for rollout in trained for row in rollout.rows]
    age_N = _ages(rows, version)
    if not len(age_N):
        return {}
    longest = sorted(trained, key=lambda rollout: rollout.sampled_tokens)[-math.ceil(len(trained) / 4) :]
    several = np.mean([_has_several(row.versions[row.mask == 1]) for row in rows])
    return {
        "async/staleness_mean": float(age_N.mean()),
        "async/staleness_p95": float(np.percentile(age_N, 95)),
        "async/staleness_max": float(age_N.max()),
        "async/staleness_longest": float(_ages([row for rollout in longest for row in rollout.rows], version).mean()),
        "async/mixed_rows": float(several),
    }


def mask_stale(rollouts: Iterable[Rollout], version: int, limit: int) -> float:
    """Set the loss mask of tokens to 0 that are older than ``limit`` policy versions; return their share of the trained ones."""
    masked = trained = 0
    for rollout in rollouts:
        for row in rollout.rows:
            stale_T = (row.mask == 1) & (version - row.versions > limit)
            trained += int((row.mask == 1).sum())
            masked += int(stale_T.sum())
            row.mask[stale_T] = 0
            row.mask_reason[stale_T] = MaskReason.STALE
        rollout.record = b""
    return masked / max(1, trained)


def lag_metrics(rollouts: Iterable[Rollout], version: int) -> dict[str, float]:
    """Return by how many policy versions the tokens of an evaluation are newer than the ``version`` that it began with."""
    lag_N = -_ages([row for rollout in rollouts for row in rollout.rows], version)
    return {"eval/lag_mean": float(lag_N.mean()), "eval/lag_max": float(lag_N.max())} if len(lag_N) else {}


def _has_several(versions_N: NDArray[np.int32]) -> bool:
    return bool(len(versions_N) and (versions_N != versions_N[0]).any())


def _ages(rows: Iterable[Row], version: int) -> NDArray[np.int32]:
    """Return the age of each trained token."""
    ages = [version - row.versions[row.mask == 1] for row in rows]
    return np.concatenate(ages) if ages else np.zeros(0, np.int32)
