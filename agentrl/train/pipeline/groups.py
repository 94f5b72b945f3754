"""Runs a group of episodes, as far as the journal does not have them."""

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
    held = await asyncio.to_thread(journal.held, position)
    whole, single = journal.is_finished(position), runner.has_single_rollouts
    same = single and {rollout.prompt_id for rollout in held} == {jobs[0].task.id}
    by_id = {rollout.rollout_id: rollout for rollout in held} if whole or same else {}
    for rollout in by_id.values():
        on_done(rollout)
    if whole:
        for _ in jobs:
            on_ended()
        return held
    missing = [job for job in jobs if job.rollout_id not in by_id]
    for _ in range(len(jobs) - len(missing)):
        on_ended()

    def done(rollout: Rollout) -> None:
        if single:
            journal.ended(position, rollout)
        on_done(rollout)

    saved = journal.episodes.of_group(position) if single else None
    rollouts = await runner.run_many(missing, done, on_ended=on_ended, check_dropped=False, saved=saved)
    if by_id:
        by_id |= {rollout.rollout_id: rollout for rollout in rollouts}
        rollouts = [by_id[job.rollout_id] for job in jobs]
    await journal.finished(position, rollouts)
    return rollouts
