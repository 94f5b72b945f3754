"""The grader contract: sets the reward of finished rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from agentrl.core.tool import CallTool
from agentrl.core.types import Rollout


class Grader(Protocol):
    """Gives rollouts their reward after they have ended, in place of what the environment gave."""

    @property
    def group(self) -> bool:
        """Whether it wants all rollouts of a task at the same time; otherwise it gets one at a time."""
        ...

    async def grade(self, rollouts: Sequence[Rollout], tools: Mapping[str, CallTool] | None = None) -> None:
        """Set ``reward`` (and figures in ``metrics``) of rollouts of one task; one that cannot be graded is dropped.

        ``tools`` run what the episodes could call, in their own sessions, by ``rollout_id``.

        Raises:
            RunStopped: a rollout cannot be graded, and the configuration stops the run over it.

        """
        ...
