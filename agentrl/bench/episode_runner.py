"""Cost of the episode runner, and the rate of building training rows; for ``agentrl bench``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.core.types import FinishReason, Generation, Row
from agentrl.episode.runner import EpisodeRunner, Job
from agentrl.episode.trajectory import Trajectory


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


async def bench_rollout(runner: EpisodeRunner, jobs: Sequence[Job]) -> RolloutTimes:
    """Run all jobs once and return the times. Run it twice and use the second: the first fills caches."""
    wall, cpu, loop = time.perf_counter(), time.process_time(), time.thread_time()
    rollouts = await runner.run_many(jobs)
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
