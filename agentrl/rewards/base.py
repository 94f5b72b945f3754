"""The grader contract: sets the reward of finished rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from agentrl.core.tool import CallTool
from agentrl.core.types import Rollout


class Grader(Protocol):
    """Sets the reward of rollouts after they have ended, in place of the environment's."""

    @property
    def group(self) -> bool:
        """Whether it needs all rollouts of a task at once; otherwise it gets them one by one."""
        ...

    async def grade(self, rollouts: Sequence[Rollout], tools: Mapping[str, CallTool] | None = None) -> None:
        """Set ``reward`` (and values in ``metrics``) of rollouts of one task; a rollout that cannot be graded is dropped.

        ``tools`` has, by ``rollout_id``, a function that runs tools in the session of that episode.

        Raises:
            RunStopped: a rollout cannot be graded, and the configuration stops the run then.
        """
        ...
