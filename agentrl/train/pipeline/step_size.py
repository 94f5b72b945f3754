"""The number of groups of a step of the synchronous loop."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from agentrl.algo.registry import compares_groups
from agentrl.batch.groups import group_rollouts
from agentrl.config.schema import Config
from agentrl.core.types import Rollout

RECENT = 0.5
"""Weight of the last step in the share of groups that teach."""


def fewest_groups(config: Config) -> int:
    """Return the fewest groups that a step of the run has."""
    rollout = config.rollout
    has_one_size = config.asynchronous.max_staleness > 0 or not compares_groups(config.algo)
    return (
        rollout.batch_size if has_one_size else min(rollout.teaching_groups or rollout.batch_size, rollout.batch_size)
    )


class StepSize:
    """Chooses how many groups a step has, so that about ``rollout.teaching_groups`` of them teach: their rewards differ.

    The share of groups that teach is estimated from the steps before, so that the choice does not depend on the rewards of the
    groups that are chosen. All of them are trained.
    """

    def __init__(self, config: Config) -> None:
        self._fewest, self._most = fewest_groups(config), config.rollout.batch_size
        self.taught = 1.0
        """Share of groups that teach, of recent steps."""

    @property
    def groups(self) -> int:
        """Groups of the next step."""
        return min(self._most, ceil(self._fewest / max(self.taught, self._fewest / self._most)))

    def record(self, rollouts: Sequence[Rollout]) -> None:
        """Record the rollouts of a step that was trained."""
        groups = group_rollouts(rollouts)
        if groups.prompt_ids_G:
            self.taught += RECENT * (1 - groups.flat_share - self.taught)
