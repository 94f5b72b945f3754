"""Metrics of the age of trained tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from agentrl.core.types import Rollout


def staleness_metrics(rollouts: Iterable[Rollout], version: int) -> dict[str, float]:
    """Return mean, 95th percentile and maximum of the age of the trained tokens, in policy versions.

    Args:
        rollouts: of a step; dropped ones do not count.
        version: the policy that the step trains.

    """
    rows = [row for rollout in rollouts if not rollout.dropped for row in rollout.rows]
    ages = [version - row.versions[row.mask == 1] for row in rows]
    age_N = np.concatenate(ages) if ages else np.zeros(0)
    if not len(age_N):
        return {}
    several = np.mean([len(np.unique(row.versions[row.mask == 1])) > 1 for row in rows])
    return {
        "async/staleness_mean": float(age_N.mean()),
        "async/staleness_p95": float(np.percentile(age_N, 95)),
        "async/staleness_max": float(age_N.max()),
        "async/mixed_rows": float(several),
    }
