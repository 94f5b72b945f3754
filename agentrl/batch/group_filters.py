"""Filters of dynamic sampling: which finished groups are not trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from agentrl.config.rollout import FilterGroupsConfig
from agentrl.core.errors import ConfigError
from agentrl.core.imports import is_reference, load_object
from agentrl.core.types import Rollout, StopReason
from agentrl.core.user_code import calling

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
