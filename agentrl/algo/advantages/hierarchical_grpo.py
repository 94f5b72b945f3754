"""Group-relative advantages by role."""

from __future__ import annotations

from collections.abc import Hashable

from typing_extensions import override

from agentrl.algo.advantages.grpo import Grpo
from agentrl.algo.advantages.rewards import regroup
from agentrl.algo.base import AdvantageInput, Advantages
from agentrl.core.types import Rollout


class HierarchicalGrpo(Grpo):
    """Advantages of ``grpo`` in groups by role: roles in ``within_episode`` are compared within an episode, others across the
    task's episodes.

    For a proposer and its solvers: solutions are compared with those of the same proposal, proposals with each other.
    """

    role_options = ("within_episode",)

    class Options(Grpo.Options):
        """Options of ``hierarchical_grpo``."""

        within_episode: tuple[str, ...] = ("solver",)
        """Roles that are compared within an episode; the others are compared across the task's episodes."""

    options: Options

    @override
    def advantages(self, inputs: AdvantageInput) -> Advantages:
        def role_group(rollout: Rollout) -> Hashable:
            return rollout.role, rollout.episode if rollout.role in self.options.within_episode else None

        return super().advantages(regroup(inputs, role_group))
