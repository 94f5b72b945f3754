"""Role-conditioned advantages of self-play."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field
from typing_extensions import override

from agentrl.algo.advantages.rewards import by_rollout, rewards_N
from agentrl.algo.base import AdvantageEstimator, AdvantageInput, Advantages
from agentrl.config.base import Section
from agentrl.core.types import Rollout


class RoleBaseline(NamedTuple):
    """A moving mean of the rewards of a role against a class of opponents; JSON has it as a list."""

    total: float = 0.0
    """Sum of rewards by their weights."""
    weight: float = 0.0
    """Sum of these weights: 0 before the first reward, towards 1 later."""

    @property
    def mean(self) -> float:
        """The mean, without the bias that a start at 0 would have; 0 before the first reward."""
        return self.total / self.weight if self.weight else 0.0


class Rae(AdvantageEstimator):
    """The reward minus a moving mean of the rewards of the rollout's role against its class of opponents; 0 before any reward.

    Source: SPIRAL, arXiv:2506.24119, section 3.3. Baselines are those before the training step, so that they do not
    depend on the step's samples. The n rewards of a key in a step count as their mean n times:
    ``b ← d^n b + (1 - d^n) mean``. With equal rewards that is n times ``b ← d b + (1 - d) r``, and it does not depend on the
    order of the rollouts.
    """

    streams = True

    class Options(AdvantageEstimator.Options):
        """Options of ``rae``."""

        decay: float = Field(default=0.95, ge=0, lt=1)
        """Factor of the older rewards' weights for each further reward."""
        by_role: bool = True
        """A baseline for each role and class of opponents; with ``false`` one for all rollouts, to compare with."""

    options: Options

    def __init__(self, options: Section | None = None, name: str | None = None) -> None:
        super().__init__(options, name)
        self.baselines: dict[str, RoleBaseline] = {}
        """By role and class of opponents, as ``ROLE/OPPONENTS``; without ``by_role``, ``all``."""

    @override
    def advantages(self, inputs: AdvantageInput) -> Advantages:
        baselines_N = [
            self.baselines.get(self._key(rollout), RoleBaseline()).mean for rollout in inputs.groups.rollouts_N
        ]
        return by_rollout(inputs, rewards_N(inputs) - np.array(baselines_N, np.float64))

    @override
    def update(self, inputs: AdvantageInput) -> None:
        rewards: dict[str, list[float]] = {}
        for rollout, reward in zip(inputs.groups.rollouts_N, rewards_N(inputs).tolist(), strict=True):
            rewards.setdefault(self._key(rollout), []).append(reward)
        for key, step_rewards in sorted(rewards.items()):
            baseline, decay = self.baselines.get(key, RoleBaseline()), self.options.decay ** len(step_rewards)
            mean = float(np.mean(np.sort(step_rewards)))
            self.baselines[key] = RoleBaseline(
                decay * baseline.total + (1 - decay) * mean, decay * baseline.weight + (1 - decay)
            )

    @override
    def state(self) -> dict[str, Any]:
        return dict(self.baselines)

    @override
    def load_state(self, state: Mapping[str, Any]) -> None:
        self.baselines = {key: RoleBaseline(*baseline) for key, baseline in state.items()}

    @override
    def metrics(self, source: str = "") -> dict[str, float]:
        """Return each baseline, as ``self_play/baseline/ROLE/OPPONENTS``, in a mixed run with the source before the role."""
        return {
            "/".join(["self_play/baseline", *filter(None, [source, *key.split("/")])]): baseline.mean
            for key, baseline in self.baselines.items()
        }

    def _key(self, rollout: Rollout) -> str:
        return f"{rollout.role}/{rollout.opponent}" if self.options.by_role else "all"
