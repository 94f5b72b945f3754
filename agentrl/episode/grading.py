"""When rollouts get their reward from a reward function."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.core.tool import CallTool
from agentrl.core.types import Rollout
from agentrl.episode.tool_calls import ToolRunner
from agentrl.obs.waiting import waiting
from agentrl.rewards.base import Grader


@dataclass(frozen=True, slots=True)
class Played:
    """An episode that has ended; the sessions of its tools are open until it is graded."""

    rollouts: list[Rollout]
    tools: ToolRunner


class Grading:
    """Hands rollouts to a grader one at a time, or a task's all together, and then on. Then it ends their sessions.

    So a group's sessions stay open until its last episode has ended: with a grader of groups a tool server holds up to
    as many sessions as episodes are run together (``rollout.batch_size`` times ``rollout.n_samples_per_prompt``) that
    called it, and its ``max_sessions`` must allow that many.

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
        self._held: dict[str, list[tuple[int, Played]]] = {}
        self._done = done

    async def ended(self, number: int, task_id: str, played: Played) -> None:
        """Take the rollouts of episode ``number``: a group is graded when its last episode has ended.

        Raises:
            RunStopped: a rollout cannot be graded, and the configuration stops the run over it.
        """
        if self._grader is None or not self._grader.group:
            await self._finish([played], together=False)
            return
        held = self._held.setdefault(task_id, [])
        held.append((number, played))
        self._left[task_id] -= 1
        if self._left[task_id] == 0:
            del self._held[task_id]
            # In the order of the episodes, not of their ends: the same rewards in every run.
            await self._finish([one for _, one in sorted(held, key=lambda pair: pair[0])], together=True)

    async def close(self) -> None:
        """End the sessions of episodes that were never graded, since the run stopped before."""
        held, self._held = self._held, {}
        await asyncio.gather(*(played.tools.close() for group in held.values() for _, played in group))

    async def _finish(self, episodes: Sequence[Played], *, together: bool) -> None:
        try:
            tools = {rollout.rollout_id: one.tools.run_scoring_call for one in episodes for rollout in one.rollouts}
            rollouts = [rollout for one in episodes for rollout in one.rollouts]
            for some in [rollouts] if together else [[rollout] for rollout in rollouts]:
                await self._grade(some, tools)
        finally:
            await asyncio.gather(*(one.tools.close() for one in episodes))

    async def _grade(self, rollouts: Sequence[Rollout], tools: Mapping[str, CallTool]) -> None:
        graded = [rollout for rollout in rollouts if not rollout.dropped]
        if self._grader is not None and graded:
            others = f"and {len(graded) - 1} others of its task" if len(graded) > 1 else ""
            with waiting("reward of rollout", graded[0].rollout_id, others):
                await self._grader.grade(graded, tools)
        if self._done is not None:
            for rollout in rollouts:
                self._done(rollout)
