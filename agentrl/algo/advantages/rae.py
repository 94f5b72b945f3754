"""Role-conditioned advantages of self-play."""

from __future__ import annotations

import numpy as np

from agentrl.algo.advantages.rewards import by_rollout, rewards_N
from agentrl.algo.base import AdvantageInput, Advantages, RoleBaseline
from agentrl.config.algo import RaeAdvantage
from agentrl.core.types import Rollout


def rae(given: AdvantageInput, options: RaeAdvantage) -> Advantages:
    """Return the reward minus the baseline of the rollout's role against its class of opponents; 0 stands in for none.

    Source: SPIRAL, arXiv:2506.24119, section 3.3. Baselines are those before the training step, so that they do not
    depend on the step's samples; `updated_baselines` returns those of the next one, with ``options``.
    """
    baselines_N = [
        given.baselines.get(baseline_key(one, options), RoleBaseline()).value for one in given.groups.rollouts_N
    ]
    return by_rollout(given, rewards_N(given) - np.array(baselines_N, np.float64))


def updated_baselines(given: AdvantageInput, options: RaeAdvantage) -> dict[str, RoleBaseline]:
    """Return the baselines after the training step.

    The n rewards of a key count as their mean n times: ``b ← d^n b + (1 - d^n) mean``. With equal rewards that is n times
    ``b ← d b + (1 - d) r``, and it does not depend on the order of the rollouts.
    """
    rewards: dict[str, list[float]] = {}
    for rollout, reward in zip(given.groups.rollouts_N, rewards_N(given).tolist(), strict=True):
        rewards.setdefault(baseline_key(rollout, options), []).append(reward)
    found: dict[str, RoleBaseline] = dict(given.baselines)
    for key, some in sorted(rewards.items()):
        before, kept = found.get(key, RoleBaseline()), options.decay ** len(some)
        mean = float(np.mean(np.sort(some)))
        found[key] = RoleBaseline(kept * before.total + (1 - kept) * mean, kept * before.weight + (1 - kept))
    return found


def baseline_key(rollout: Rollout, options: RaeAdvantage) -> str:
    """Return the key of a rollout's baseline: its role and its class of opponents; without ``by_role``, ``all``."""
    return f"{rollout.role}/{rollout.opponent}" if options.by_role else "all"
