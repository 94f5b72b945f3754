"""Cost of the episode runner and of the loops around it, and the rate of building training rows; for ``agentrl bench``."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.config.rollout import RolloutConfig
from agentrl.core.types import FinishReason, Generation, Rollout, Row
from agentrl.data.jobs import Job
from agentrl.episode.runner import GroupRunner
from agentrl.episode.trajectory import Trajectory
from agentrl.obs.rollouts import Form, RolloutRecorder
from agentrl.train.pipeline.journal import Journal
from agentrl.train.pipeline.scheduler import GroupScheduler, SynchronousScheduler
from agentrl.train.pipeline.staleness_bound import Admission
from agentrl.train.rollout_source import TaskPosition

SAMPLES = 8
"""Episodes of a group in `bench_loop`."""


@dataclass(frozen=True, slots=True)
class RolloutTimes:
    """Results of `bench_rollout`."""

    episodes: int
    turns: int
    sampled_tokens: int
    seconds: float
    """Wall time of all episodes."""
    episodes_per_s: float
    tokens_per_s: float
    """Sampled tokens per second."""
    cpu_ms_per_turn: float
    """CPU time of this process per turn: event loop and all threads, with the sampler if it runs in the process."""
    loop_ms_per_turn: float
    """CPU time of the event loop's thread per turn."""


async def bench_rollout(runner: GroupRunner, jobs: Sequence[Job]) -> RolloutTimes:
    """Run all jobs once and return the times. Run it twice and use the second: the first fills caches."""
    return await _measure(runner.run_many(jobs))


async def bench_loop(
    runner: GroupRunner,
    jobs: Sequence[Job],
    concurrency: int,
    max_staleness: int,
    folder: Path,
    form: Form = "jsonl",
) -> RolloutTimes:
    """Run all jobs once as groups of training steps, and return the times.

    Admission, journal and files of rollouts are those of a run; nothing is trained, and no weights are synced. Without
    staleness all groups are of one step. With staleness the groups that run at the same time are of ``max_staleness + 1`` steps.

    Args:
        runner: of the episodes.
        jobs: the episodes.
        concurrency: most episodes at the same time, as the runner has it.
        max_staleness: as ``async.max_staleness``.
        folder: for journal and rollouts; without those of another call.
        form: of the files of rollouts.
    """
    batch, steps = max(1, len(jobs) // SAMPLES), 1
    if max_staleness:
        batch = max(1, min(concurrency, len(jobs)) // ((max_staleness + 1) * SAMPLES))
        steps = max(1, len(jobs) // (batch * SAMPLES))
    groups = [list(jobs[first :: steps * batch]) for first in range(steps * batch)]
    admission = Admission(itertools.count(), step=0, steps=steps, batch_size=batch, max_staleness=max_staleness)
    journal, recorder = Journal(folder).begin(), RolloutRecorder(folder / "rollouts", form=form)
    kind = GroupScheduler if max_staleness else SynchronousScheduler
    rollout = RolloutConfig(concurrency=concurrency)
    scheduler = kind(admission, runner, groups.__getitem__, nullcontext, journal, rollout)
    try:
        return await _measure(_take_steps(scheduler, recorder, steps))
    finally:
        await scheduler.aclose()
        journal.close()


async def _take_steps(scheduler: GroupScheduler, recorder: RolloutRecorder, steps: int) -> list[Rollout]:
    """Take the rollouts of all steps, record them as a run does, and return them."""
    rollouts: list[Rollout] = []
    position = TaskPosition()
    for step in range(1, steps + 1):
        taken = await scheduler.take()
        assert taken is not None, "the admission has groups for all steps"
        position = position.after(taken.positions)
        await scheduler.journal.record_taken(step, taken.positions, position)
        await asyncio.to_thread(recorder.write, step, taken.rollouts)
        scheduler.set_version(step)
        rollouts += taken.rollouts
    return rollouts


async def _measure(episodes: Coroutine[Any, Any, list[Rollout]]) -> RolloutTimes:
    wall, cpu, loop = time.perf_counter(), time.process_time(), time.thread_time()
    rollouts = await episodes
    wall, cpu, loop = time.perf_counter() - wall, time.process_time() - cpu, time.thread_time() - loop
    turns = sum(len(rollout.turns) for rollout in rollouts)
    sampled = sum(rollout.sampled_tokens for rollout in rollouts)
    return RolloutTimes(
        episodes=len(rollouts),
        turns=turns,
        sampled_tokens=sampled,
        seconds=wall,
        episodes_per_s=len(rollouts) / wall,
        tokens_per_s=sampled / wall,
        cpu_ms_per_turn=1e3 * cpu / max(1, turns),
        loop_ms_per_turn=1e3 * loop / max(1, turns),
    )


def synthetic_rows(episodes: int, turns: int, tokens: int) -> list[Row]:
    """Return rows of episodes in which the policy samples ``tokens`` per turn and observes as many.

    They are built as in the runner, from prompts and generations.
    """
    rows: list[Row] = []
    observed = tuple(range(1000, 1000 + tokens))
    generations = [
        Generation(observed[::-1], (-0.5,) * tokens, FinishReason.STOP, ((0, 1),), 0, f"request-{turn}")
        for turn in range(turns)
    ]
    for episode in range(episodes):
        trajectory = Trajectory()
        prompt = observed
        for generation in generations:
            trajectory.extend_to(prompt)
            trajectory.append_sampled(generation)
            prompt = trajectory.token_ids + observed
        rows += trajectory.rows(f"prompt-{episode // 8}", f"rollout-{episode}")
    return rows
