"""Groups of a step's rollouts by task. Legend: ``N`` rollouts, ``G`` groups."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.core.errors import ConfigError
from agentrl.core.task import task_source_name
from agentrl.core.types import Rollout, Row


@dataclass(frozen=True, slots=True)
class RolloutGroups:
    """Rollouts to train on, sorted by task. Groups may differ in size."""

    rollouts_N: tuple[Rollout, ...]
    """All rollouts that were not dropped."""
    groups_N: NDArray[np.int64]
    """``[N]`` group number of each rollout, from 0."""
    prompt_ids_G: tuple[str, ...]
    """Task id of each group."""
    dropped: int = 0
    """Number of rollouts that the failure policy dropped."""

    @property
    def rewards_N(self) -> NDArray[np.float32]:
        """``[N]`` reward of each rollout."""
        return np.array([rollout.reward for rollout in self.rollouts_N], np.float32)

    @property
    def rows(self) -> list[Row]:
        """All training rows."""
        return [row for rollout in self.rollouts_N for row in rollout.rows]

    @property
    def flat_share(self) -> float:
        """Share of groups whose rewards are all equal, so that group-relative advantages are 0."""
        rewards: dict[int, set[float]] = {}
        for rollout, group in zip(self.rollouts_N, self.groups_N.tolist(), strict=True):
            rewards.setdefault(group, set()).add(float(np.float32(rollout.reward)))
        return sum(len(group_rewards) == 1 for group_rewards in rewards.values()) / max(1, len(rewards))


def group_rollouts(rollouts: Iterable[Rollout]) -> RolloutGroups:
    """Group rollouts by ``prompt_id`` (not by position, as a group may have lost some), without dropped ones."""
    groups: dict[str, list[Rollout]] = {}
    dropped = 0
    for rollout in rollouts:
        if rollout.dropped:
            dropped += 1
        else:
            groups.setdefault(rollout.prompt_id, []).append(rollout)
    numbers = [number for number, group in enumerate(groups.values()) for _ in group]
    kept_rollouts = tuple(rollout for group in groups.values() for rollout in group)
    return RolloutGroups(kept_rollouts, np.array(numbers, np.int64), tuple(groups), dropped)


def groups_by_policy(groups: RolloutGroups) -> dict[str, RolloutGroups]:
    """Return the groups of each policy in a run with several, in the order of their names."""
    names = sorted({rollout.policy for rollout in groups.rollouts_N})
    if len(names) == 1:
        return {names[0]: groups}
    return {name: group_rollouts(rollout for rollout in groups.rollouts_N if rollout.policy == name) for name in names}


def groups_by_source(groups: RolloutGroups, sources: Collection[str]) -> dict[str, RolloutGroups]:
    """Return the groups of each source of a mixed run that has some; all as ``""`` if there are no sources.

    Raises:
        ConfigError: a task is of no source.
    """
    if not sources:
        return {"": groups}
    rollouts: dict[str, list[Rollout]] = {name: [] for name in sources}
    for rollout in groups.rollouts_N:
        if (name := task_source_name(rollout.prompt_id)) not in rollouts:
            raise ConfigError(
                f"the task {rollout.prompt_id!r} is of none of the run's sources ({', '.join(sources)}), whose names task ids "
                "begin with; set sources to those of the run that recorded it"
            )
        rollouts[name].append(rollout)
    return {name: group_rollouts(source_rollouts) for name, source_rollouts in rollouts.items() if source_rollouts}
