"""Runs the episodes of a group that the journal does not have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from agentrl.core.types import Rollout
from agentrl.data.jobs import Job
from agentrl.episode.runner import EpisodeRunner
from agentrl.train.pipeline.journal import Journal


async def run_group(
    journal: Journal,
    runner: EpisodeRunner,
    position: int,
    jobs: Sequence[Job],
    *,
    on_ended: Callable[[], None] = lambda: None,
    on_done: Callable[[Rollout], None] = lambda _: None,
) -> list[Rollout]:
    """Run the episodes of a group that the journal does not have, and return the rollouts of all, which it has then.

    Args:
        journal: of the run.
        runner: of the episodes.
        position: of the group's task.
        jobs: all episodes of the group.
        on_ended: called for each episode when it has ended.
        on_done: called with each rollout.

    Raises:
        RunStopped: see `EpisodeRunner.run_many`.
        ConfigError: the journal is damaged.
    """
    journaled = await asyncio.to_thread(journal.read_group, position)
    finished, single = journal.is_finished(position), runner.has_single_rollouts
    same_task = single and {rollout.prompt_id for rollout in journaled} == {jobs[0].task.id}
    by_id = {rollout.rollout_id: rollout for rollout in journaled} if finished or same_task else {}
    for rollout in by_id.values():
        on_done(rollout)
    if finished:
        for _ in jobs:
            on_ended()
        return journaled
    remaining = [job for job in jobs if job.rollout_id not in by_id]
    for _ in range(len(jobs) - len(remaining)):
        on_ended()

    def done(rollout: Rollout) -> None:
        if single:
            journal.record_ended(position, rollout)
        on_done(rollout)

    saved = journal.episodes.group_states(position) if single else None
    rollouts = await runner.run_many(remaining, done, on_ended=on_ended, check_dropped=False, saved=saved)
    if by_id:
        by_id |= {rollout.rollout_id: rollout for rollout in rollouts}
        rollouts = [by_id[job.rollout_id] for job in jobs]
    await journal.record_finished(position, rollouts)
    return rollouts
