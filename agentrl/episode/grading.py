"""When rollouts get their reward from a reward function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from agentrl.protocols import Grader
from agentrl.types import Rollout


class Grading:
    """Hands rollouts to a grader one at a time, or a task's all together, and then on.

    Args:
        grader: gives rewards; None leaves the environment's.
        task_ids: the task of every episode to come, once an episode.
        done: gets each rollout when it has its reward.
    """

    def __init__(
        self, grader: Grader | None, task_ids: Iterable[str], done: Callable[[Rollout], None] | None = None
    ) -> None:
        self._grader = grader
        self._left = Counter(task_ids)
        self._held: dict[str, list[tuple[int, Sequence[Rollout]]]] = {}
        self._done = done

    async def ended(self, number: int, task_id: str, rollouts: Sequence[Rollout]) -> None:
        """Take the rollouts of episode ``number``: a group is graded when its last episode has ended.

        Raises:
            RunStopped: a rollout cannot be graded, and the configuration stops the run over it.
        """
        if self._grader is None or not self._grader.group:
            for rollout in rollouts:
                await self._grade([rollout])
            return
        held = self._held.setdefault(task_id, [])
        held.append((number, rollouts))
        self._left[task_id] -= 1
        if self._left[task_id] == 0:
            del self._held[task_id]
            # In the order of the episodes, not of their ends: the same rewards in every run.
            await self._grade([rollout for _, some in sorted(held, key=lambda one: one[0]) for rollout in some])

    async def _grade(self, rollouts: Sequence[Rollout]) -> None:
        graded = [rollout for rollout in rollouts if not rollout.dropped]
        if self._grader is not None and graded:
            await self._grader.grade(graded)
        if self._done is not None:
            for rollout in rollouts:
                self._done(rollout)
