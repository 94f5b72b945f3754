"""Groups of a step's rollouts by task, and their filters. Legend: ``N`` rollouts, ``G`` groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from agentrl.config.rollout import FilterGroupsConfig
from agentrl.core.errors import ConfigError
from agentrl.core.images import Image
from agentrl.core.imports import is_reference, load_object
from agentrl.core.task import task_source_name
from agentrl.core.types import Rollout, Row, StopReason
from agentrl.core.user_code import calling


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
    def images(self) -> dict[str, Image]:
        """All images of the rows, by digest."""
        return {digest: image for rollout in self.rollouts_N for digest, image in rollout.images.items()}

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


Filter = Callable[[Sequence[Rollout]], bool]
"""Returns whether a group, the rollouts of a task with those that the failure policy dropped, is not trained."""

KEY = "rollout.filter_groups.filters"
FAILED = "failed"
"""The reason for a group without a rollout that the failure policy keeps, if there are filters."""
LIMITS = (StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.MAX_TIME)
"""Ends of episodes that are too long."""


def kept_rollouts(group: Sequence[Rollout]) -> list[Rollout]:
    """Return the rollouts that the failure policy did not drop."""
    return [rollout for rollout in group if not rollout.dropped]


def zero_variance(group: Sequence[Rollout], solved_reward: float) -> bool:
    """Return whether all rewards are equal (DAPO's dynamic sampling, arXiv:2503.14476)."""
    return len({rollout.reward for rollout in kept_rollouts(group)}) < 2


def all_solved(group: Sequence[Rollout], solved_reward: float) -> bool:
    """Return whether each rollout is solved."""
    return all(rollout.reward >= solved_reward for rollout in kept_rollouts(group))


def none_solved(group: Sequence[Rollout], solved_reward: float) -> bool:
    """Return whether no rollout is solved."""
    return all(rollout.reward < solved_reward for rollout in kept_rollouts(group))


def too_long(group: Sequence[Rollout], solved_reward: float) -> bool:
    """Return whether each rollout ended at a limit of turns, tokens or time."""
    return all(rollout.stop_reason in LIMITS for rollout in kept_rollouts(group))


def incomplete(group: Sequence[Rollout], solved_reward: float) -> bool:
    """Return whether the failure policy dropped a rollout."""
    return any(rollout.dropped for rollout in group)


FILTERS = {
    "zero_variance": zero_variance,
    "all_solved": all_solved,
    "none_solved": none_solved,
    "too_long": too_long,
    "incomplete": incomplete,
}
"""By name."""


class GroupFilters:
    """The filters of a run.

    Raises:
        ConfigError: there is no filter of a name.
    """

    def __init__(self, config: FilterGroupsConfig) -> None:
        self._filters: dict[str, Filter] = {}
        for name in config.filters:
            if is_reference(name):
                self._filters[name] = partial(_call, name, load_object(name, KEY))
            elif name in FILTERS:
                self._filters[name] = partial(FILTERS[name], solved_reward=config.solved_reward)
            else:
                raise ConfigError(
                    f"{KEY}: there is no filter {name!r}; there are {', '.join(FILTERS)}, and functions as module:function"
                )

    def reason(self, group: Sequence[Rollout]) -> str:
        """Return the first filter that drops a group, or `FAILED`; an empty text if the group is trained.

        Raises:
            ConfigError: a filter of the user raises, or returns no bool.
        """
        if self._filters and not kept_rollouts(group):
            return FAILED
        return next((name for name, drops in self._filters.items() if drops(group)), "")


def _call(name: str, function: Filter, group: Sequence[Rollout]) -> bool:
    """Call a filter of the user."""
    with calling(f"{KEY}: {name}", f" on the group of task {group[0].prompt_id!r}"):
        drops = function(group)
    if not isinstance(drops, bool):
        raise ConfigError(f"{KEY}: {name} must return True (drop the group) or False, it returned {drops!r:.100}")
    return drops
