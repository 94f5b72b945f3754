"""Group-relative advantages by seat."""

from __future__ import annotations

import numpy as np
from typing_extensions import override

from agentrl.algo.advantages.grpo import Grpo
from agentrl.algo.advantages.rewards import by_rollout, centred_N, group_means_N, group_sizes_N, regroup, rewards_N
from agentrl.algo.base import AdvantageInput, Advantages


class SeatGrpo(Grpo):
    """``r - mean(seat)`` over the task's rollouts in this seat, divided by ``std(task) + eps`` with ``std_normalise``.

    All rollouts of a task start in the same state (``rollout.reset_seed=task``), with the seats swapped among them. So the
    mean is what this seat gets from this state, and the luck of the deal and of the seat cancel. The standard deviation is
    that of both seats around their own means (pooled: n minus the number of seats). A rollout alone in its seat gets 0.
    """

    @override
    def advantages(self, inputs: AdvantageInput) -> Advantages:
        centred = centred_N(regroup(inputs, lambda rollout: rollout.seat), rewards_N(inputs))
        if not self.options.std_normalise:
            return by_rollout(inputs, centred)
        squares = group_means_N(inputs, centred**2) * group_sizes_N(inputs)
        variances = squares / np.maximum(group_sizes_N(inputs) - _seat_counts_N(inputs), 1)
        return by_rollout(inputs, centred / (np.sqrt(variances) + self.options.std_eps))


def _seat_counts_N(inputs: AdvantageInput) -> np.ndarray:
    """Return the number of seats that occur in each rollout's group."""
    groups = inputs.groups
    seats: list[set[int]] = [set() for _ in groups.prompt_ids_G]
    for rollout, group in zip(groups.rollouts_N, groups.groups_N.tolist(), strict=True):
        seats[group].add(rollout.seat)
    return np.array([len(seats_of_group) for seats_of_group in seats])[groups.groups_N]
