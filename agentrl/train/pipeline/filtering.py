"""Groups that filters drop from a run, and whether the choice of trained groups depends on the length of their episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.batch.groups import GroupFilters, kept_rollouts
from agentrl.config.rollout import RolloutConfig
from agentrl.core.errors import RunStopped
from agentrl.core.types import Rollout
from agentrl.evaluation.intervals import mean


class Filtering:
    """Applies ``rollout.filter_groups`` to the groups of a run as they finish.

    Raises:
        ConfigError: there is no filter of a name.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._filters = GroupFilters(config.filter_groups)
        self._groups: dict[int, list[Rollout]] = {}
        """Filtered since the step before, by position."""
        self._count = 0
        """Number of those that this process filtered: a run that the limit has stopped can be resumed."""
        self._reasons: Counter[str] = Counter()
        """Reasons of these groups."""
        self._rewards: list[float] = []
        """Rewards of the rollouts that ended since the step before, without those that the failure policy dropped."""
        self.metrics: dict[str, float] = {}
        """Metrics of the groups that were taken last."""

    @property
    def filtered(self) -> list[Rollout]:
        """The rollouts of groups that were filtered since the step before."""
        return [rollout for group in self._groups.values() for rollout in group]

    def drop(self, position: int, group: list[Rollout]) -> str:
        """Return the filter that drops a finished group, whose rollouts are then marked as dropped; empty if none does.

        Raises:
            ConfigError: a filter of the user raises, or returns no bool.
        """
        reason = self._filters.reason(group)
        if reason:
            self.restore(position, group, reason)
            self._count += 1
        else:
            self._rewards += [rollout.reward for rollout in group if not rollout.dropped]
        return reason

    def restore(self, position: int, group: list[Rollout], reason: str) -> None:
        """Add a group that the filter ``reason`` dropped, also in an earlier process of the run."""
        self._groups[position] = group
        self._reasons[reason] += 1
        for rollout in kept_rollouts(group):
            self._rewards.append(rollout.reward)
            rollout.dropped, rollout.filtered, rollout.record = True, reason, b""

    def check(self, step: int) -> None:
        """Check the number of groups that were filtered since the step before.

        Raises:
            RunStopped: they leave less than a batch of the groups that ``step`` may sample.
        """
        plan, batch, count = self._config.filter_groups, self._config.batch_size, self._count
        if count <= (plan.max_num_gen_batches - 1) * batch:
            return
        reasons = ", ".join(f"{name} {times}" for name, times in self._reasons.most_common())
        raise RunStopped(
            f"step {step} has no full batch: {count} groups were filtered ({reasons}; mean reward {mean(self._rewards):g}), and "
            f"rollout.filter_groups.max_num_gen_batches={plan.max_num_gen_batches} batches of rollout.batch_size={batch} are "
            "the limit. Take tasks that the policy sometimes solves, raise rollout.n_samples_per_prompt, sampler.temperature or "
            "the limit, or leave out a filter of rollout.filter_groups.filters"
        )

    def take(self) -> dict[int, list[Rollout]]:
        """Return the groups that were filtered since the step before, by position, as a step takes its groups."""
        groups, reasons, rewards = self._groups, self._reasons, self._rewards
        lengths = [float(rollout.sampled_tokens) for rollout in self.filtered]
        self._groups, self._reasons, self._rewards, self._count = {}, Counter(), [], 0
        if self._config.filter_groups.filters:
            self.metrics = {
                "rollout/filtered_groups": float(len(groups)),
                "rollout/filtered_tokens": mean(lengths),
                "rollout/unfiltered_reward": mean(rewards),
                **{f"rollout/filtered/{name}": float(count) for name, count in reasons.items()},
            }
        return groups


@dataclass(slots=True)
class Lengths:
    """Number and sampled tokens of rollouts."""

    rollouts: int = 0
    tokens: int = 0

    def add(self, rollouts: int, tokens: int) -> None:
        """Count rollouts with their tokens."""
        self.rollouts += rollouts
        self.tokens += tokens

    @property
    def mean(self) -> float:
        """Return the mean sampled tokens of a rollout, 0 for none."""
        return self.tokens / max(1, self.rollouts)


class LengthBias:
    """Compares the rollouts that were trained with all rollouts of the tasks in their order.

    Groups begin in the order of tasks. Up to the oldest group that waits or runs, all groups were trained or filtered, so their
    mean length is that of the policy. Groups behind it were trained ahead of a longer one.
    """

    def __init__(self) -> None:
        self._trained, self._in_order = Lengths(), Lengths()
        self._ahead: dict[int, tuple[int, int]] = {}
        """Rollouts and tokens of groups behind a group that waits or runs, by position."""

    def add(self, groups: Mapping[int, Sequence[Rollout]], *, trained: bool) -> None:
        """Count groups by position that were trained or filtered."""
        for position, group in groups.items():
            size = (len(group), sum(rollout.sampled_tokens for rollout in group))
            self._ahead[position] = size
            if trained:
                self._trained.add(*size)

    def metric(self, oldest: int | None) -> dict[str, float]:
        """Return ``async/length_bias``: mean tokens of the trained rollouts by those of all rollouts in the order of tasks.

        Args:
            oldest: position of the first group that waits or runs; None if there is none.
        """
        for position in sorted(self._ahead):
            if oldest is None or position < oldest:
                self._in_order.add(*self._ahead.pop(position))
        return {"async/length_bias": self._trained.mean / self._in_order.mean} if self._in_order.tokens else {}
