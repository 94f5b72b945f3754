"""Group-relative advantages whose groups are smaller than a task's rollouts: by seat, or by role and episode."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from agentrl.algo.advantages.grpo import grpo
from agentrl.algo.advantages.rewards import by_rollout, centred_N, group_means_N, group_sizes_N, rewards_N
from agentrl.algo.base import AdvantageInput, Advantages
from agentrl.config.algo import GrpoAdvantage, HierarchicalGrpoAdvantage
from agentrl.core.types import Rollout


def seat_grpo(given: AdvantageInput, options: GrpoAdvantage) -> Advantages:
    """Return ``r - mean(seat)`` over the task's rollouts in this seat, divided by ``std(task) + eps`` with ``std_normalise``.

    All rollouts of a task start in the same state (``rollout.reset_seed=task``), with the seats swapped among them. So the
    mean is what this seat gets from this state, and the luck of the deal and of the seat cancel. The standard deviation is
    that of both seats around their own means (pooled: n minus the number of seats). A rollout alone in its seat gets 0.
    """
    centred = centred_N(_regrouped(given, lambda rollout: rollout.seat), rewards_N(given))
    if not options.std_normalise:
        return by_rollout(given, centred)
    squares = group_means_N(given, centred**2) * group_sizes_N(given)
    seats = np.array([len(some) for some in _seats(given)])[given.groups.groups_N]
    variances = squares / np.maximum(group_sizes_N(given) - seats, 1)
    return by_rollout(given, centred / (np.sqrt(variances) + options.std_eps))


def _seats(given: AdvantageInput) -> list[set[int]]:
    """Return the seats that occur in each group."""
    found: list[set[int]] = [set() for _ in given.groups.prompt_ids_G]
    for rollout, group in zip(given.groups.rollouts_N, given.groups.groups_N.tolist(), strict=True):
        found[group].add(rollout.seat)
    return found


def hierarchical_grpo(given: AdvantageInput, options: HierarchicalGrpoAdvantage) -> Advantages:
    """Return `grpo` advantages in groups by role: roles in ``within_episode`` are compared within an episode, others across
    the task's episodes.

    For a proposer and its solvers: solutions are compared with those of the same proposal, proposals with each other.
    """

    def part(rollout: Rollout) -> Hashable:
        return rollout.role, rollout.episode if rollout.role in options.within_episode else None

    return grpo(_regrouped(given, part), GrpoAdvantage(std_normalise=options.std_normalise, std_eps=options.std_eps))


def _regrouped(given: AdvantageInput, part: Callable[[Rollout], Hashable]) -> AdvantageInput:
    """Return the same rollouts in groups of one task and equal ``part``."""
    numbers: dict[Hashable, int] = {}
    pairs = zip(given.groups.rollouts_N, given.groups.groups_N.tolist(), strict=True)
    groups_N: NDArray[np.int64] = np.array(
        [numbers.setdefault((group, part(one)), len(numbers)) for one, group in pairs], np.int64
    )
    prompt_ids = dict(zip(groups_N.tolist(), (one.prompt_id for one in given.groups.rollouts_N), strict=True))
    names = tuple(prompt_ids[number] for number in range(len(numbers)))
    return replace(given, groups=replace(given.groups, groups_N=groups_N, prompt_ids_G=names))
