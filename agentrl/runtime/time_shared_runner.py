"""A runner whose episodes count as work of the policy's engines, which share GPUs with those of judges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agentrl.core.types import Rollout
from agentrl.data.jobs import Job
from agentrl.episode.runner import GroupRunner, SamplingChange
from agentrl.episode.state import SavedStates
from agentrl.inference.fleet.time_sharing import EngineTimeSharing


@dataclass(frozen=True, slots=True)
class TimeSharedRunner:
    """Implements `agentrl.episode.runner.GroupRunner`: reports the episodes of another runner to the time sharing."""

    runner: GroupRunner
    time_sharing: EngineTimeSharing

    @property
    def has_single_rollouts(self) -> bool:
        """Whether each episode is one rollout, with the id of its job."""
        return self.runner.has_single_rollouts

    def with_sampling(self, change: SamplingChange) -> GroupRunner:
        """Return a runner with these sampling parameters, under the same limit of concurrent episodes."""
        return replace(self, runner=self.runner.with_sampling(change))

    async def run_many(
        self,
        jobs: Sequence[Job],
        on_done: Callable[[Rollout], None] | None = None,
        *,
        on_ended: Callable[[], None] = lambda: None,
        check_dropped: bool = True,
        saved: SavedStates | None = None,
    ) -> list[Rollout]:
        """Run all jobs; see `GroupRunner.run_many`. Their judge gets the GPUs once no episode runs any more."""
        running = len(jobs)

        def end_episode() -> None:
            nonlocal running
            if running:
                running -= 1
                self.time_sharing.add_episodes(-1)
            on_ended()

        self.time_sharing.add_episodes(running)
        try:
            return await self.runner.run_many(
                jobs, on_done, on_ended=end_episode, check_dropped=check_dropped, saved=saved
            )
        finally:
            self.time_sharing.add_episodes(-running)
            running = 0

    def check_dropped(self, rollouts: Sequence[Rollout]) -> None:
        """See `FailurePolicy.check_dropped`."""
        self.runner.check_dropped(rollouts)
