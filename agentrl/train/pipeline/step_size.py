"""The number of groups of a step of the synchronous loop."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from agentrl.batch.groups import group_rollouts
from agentrl.config.rollout import RolloutConfig
from agentrl.core.types import Rollout

RECENT = 0.5
"""Weight of the last step in the share of groups that teach."""


class StepSize:
    """Chooses how many groups a step has, so that about ``rollout.teaching_groups`` of them teach: their rewards differ.

    The share of groups that teach is estimated from the steps before, so that the choice does not depend on the rewards of the
    groups that are chosen. All of them are trained.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self.taught = 1.0
        """Share of groups that teach, of recent steps."""

    @property
    def groups(self) -> int:
        """Groups of the next step."""
        teaching, most = self._config.teaching_groups, self._config.batch_size
        return most if teaching is None else min(most, ceil(teaching / max(self.taught, teaching / most)))

    def record(self, rollouts: Sequence[Rollout]) -> None:
        """Record the rollouts of a step that was trained."""
        groups = group_rollouts(rollouts)
        if groups.prompt_ids_G:
            self.taught += RECENT * (1 - groups.flat_share - self.taught)
