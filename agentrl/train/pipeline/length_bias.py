"""Whether the choice of trained groups depends on the length of their episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.core.types import Rollout


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
